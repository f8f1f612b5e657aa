"""The runs whose bits are recorded: a line of words each, and what flags a word stands for.

The first word is the kind of run; ``tp2 pp2 dp2`` are 8 processes. All save after the second and the fourth step.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

COMMON = (
    "--train-iters 4 --save ck --save-interval 2 --log-dir logs --log-interval 1 --no-tensorboard --no-progress-bar "
    "--micro-batch-size 2 --global-batch-size 8 --clip-grad 0"
)
PRETRAIN = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --init-method-std 0.2 --lr 0.01 "
    "--mock-data --vocab-size 97 --make-vocab-size-divisible-by 8 --seq-length 32"
)
DOCUMENTS = (
    "--no-mock-data --data-path {inputs}/texts.jsonl --tokenizer-model {inputs}/llama/tokenizer.json "
    "--data-cache-path cache --vocab-size 300 --reset-attention-mask --reset-position-ids"
)
GPT2 = (
    "--normalization LayerNorm --no-swiglu --tanh-gelu --position-embedding-type learned_absolute "
    "--no-disable-bias-linear --max-position-embeddings 64"
)
FINETUNE = "--load {inputs}/llama --data-path {inputs}/sft.jsonl --seq-length 48 --lr 0.01"
DPO = "--objective dpo --data-path {inputs}/dpo.jsonl"

KINDS = {
    "pretrain": PRETRAIN,
    "sft": FINETUNE,
    "lora": f"{FINETUNE} --lora-rank 4",
    "dpo": f"{FINETUNE} {DPO}",
    "dpo-lora": f"{FINETUNE} {DPO} --lora-rank 4",
}
WORDS = {
    "sp": "--sequence-parallel",
    "layers4": "--num-layers 4",
    "layers8": "--num-layers 8",
    "reshard": "--pipeline-reshard",
    "bf16": "--bf16",
    "compile": "--compile",
    "math": "--attention-backend math",
    "clip": "--clip-grad 0.1",
    "sgd": "--optimizer sgd --sgd-momentum 0.9",
    "eval": "--eval-interval 2 --eval-iters 1",
    "hidden-dropout": "--hidden-dropout 0.1",
    "attention-dropout": "--attention-dropout 0.1",
    "tied": "--no-untie-embeddings-and-output-weights",
    "qknorm": "--qk-layernorm",
    "window": "--window-size 7",
    "gpt2": GPT2,
    "odd": "--seq-length 31",
    "documents": f"{DOCUMENTS} --eod-mask-loss",
    "best-fit": f"{DOCUMENTS} --packing best-fit",
    "unpacked": "--packing off",
    "from-gpt2": "--load {inputs}/gpt2 --tokenizer-model {inputs}/llama",
    "from-pretrained": "--load {cases}/pretrain_tied_qknorm_window_documents_eval/ck --tokenizer-model {inputs}/llama",
    "lora-dropout": "--lora-dropout 0.25",
    "some-modules": "--lora-target-modules query,value,down",
    "smoothed": "--dpo-label-smoothing 0.1",
    "precomputed": "--dpo-reference precomputed",
    "copy": "--dpo-reference copy",
}
PATTERNS = {
    r"tp(\d)": "--tensor-model-parallel-size {}",
    r"pp(\d)": "--pipeline-model-parallel-size {}",
    r"dp(\d)": "",
    r"kv(\d)": "--num-query-groups {}",
    r"shard(\d)": "--hybrid-shard-degree {}",
    r"batch(\d+)": "--global-batch-size {}",
    r"(gpipe|1f1b|interleaved|zb-h1|zb-v)": "--pipeline-schedule {}",
    r"(selective|full)": "--recompute-granularity {}",
}
RUNS = """
pretrain qknorm clip eval
pretrain tied qknorm window documents eval
pretrain gpt2 kv2 attention-dropout hidden-dropout batch2
pretrain tp2 pp2 1f1b dp2 full documents attention-dropout clip reshard eval
pretrain tp2 sp pp2 gpipe dp2 shard1 bf16 selective tied kv1 odd hidden-dropout sgd math
pretrain pp2 zb-v layers4 qknorm tied kv2 best-fit math reshard
pretrain pp2 zb-v layers4 bf16 window hidden-dropout clip eval
pretrain dp4 shard2 bf16 full gpt2 tied kv2 best-fit attention-dropout sgd eval
pretrain tp2 pp2 zb-h1 bf16 selective gpt2 kv1 odd reshard eval
pretrain tp4 full qknorm kv1 documents hidden-dropout math
pretrain tp2 dp2 selective window tied sgd math
pretrain pp2 interleaved layers4 dp2 shard1 selective window kv1 best-fit attention-dropout clip reshard
pretrain tp2 sp pp2 gpipe qknorm odd attention-dropout reshard eval
pretrain tp2 sp pp2 interleaved layers4 bf16 full gpt2 tied kv2 documents clip math eval
pretrain pp2 1f1b dp2 bf16 gpt2 kv2 hidden-dropout reshard
pretrain pp4 zb-h1 layers4 kv1 documents sgd reshard
pretrain tp4 sp bf16 selective qknorm kv2 odd clip
pretrain pp2 zb-h1 dp2 shard1 full qknorm tied kv2 hidden-dropout clip math
pretrain pp4 zb-v layers8 full window tied kv2 odd hidden-dropout
pretrain pp4 interleaved layers8 tied best-fit hidden-dropout math
pretrain pp4 gpipe layers4 bf16 selective qknorm tied kv1 attention-dropout sgd reshard
pretrain pp4 1f1b layers4 full gpt2 tied best-fit attention-dropout sgd reshard eval
pretrain pp2 1f1b dp2 shard1 selective window tied kv1 documents sgd math eval
pretrain tp4 bf16 tied kv2 attention-dropout sgd eval
pretrain pp4 interleaved layers8 bf16 selective window kv1 attention-dropout sgd reshard eval
pretrain pp4 gpipe layers4 window best-fit hidden-dropout clip math eval
pretrain pp4 zb-v layers8 bf16 selective gpt2 kv1 best-fit clip math reshard eval
pretrain pp4 1f1b layers4 bf16 selective qknorm kv2 odd clip math
pretrain pp4 zb-h1 layers4 bf16 selective window tied kv2 odd hidden-dropout clip math eval
pretrain dp4 shard2 kv1 math
pretrain tp2 pp2 interleaved layers4 qknorm kv2 best-fit hidden-dropout eval
pretrain tp4 sp gpt2 tied documents hidden-dropout sgd math eval
pretrain pp2 zb-v layers4 dp2 full qknorm tied kv1 odd attention-dropout sgd reshard
pretrain pp2 gpipe dp2 full gpt2 tied kv2 best-fit clip math reshard
pretrain tp2 sp pp2 zb-h1 window best-fit attention-dropout sgd reshard eval
pretrain pp2 zb-v layers4 dp2 shard1 bf16 gpt2 documents attention-dropout reshard eval
pretrain pp4 1f1b layers4 bf16 kv1 documents hidden-dropout math
pretrain dp4 shard2 bf16 selective qknorm odd hidden-dropout clip
pretrain tp4 selective window best-fit clip math eval
sft unpacked
sft pp2 zb-v dp2 full hidden-dropout clip math
sft unpacked tp2 sp pp2 interleaved selective eval math
sft unpacked dp4 shard2 bf16 full from-gpt2 hidden-dropout clip eval
sft tp2 sp pp2 zb-h1 bf16 from-pretrained attention-dropout eval
sft dp4 shard2 selective from-gpt2 sgd math
lora some-modules unpacked dp2 bf16 full from-pretrained eval math
lora pp2 gpipe from-gpt2 sgd eval math
lora lora-dropout tp4 sp bf16 full from-pretrained attention-dropout sgd
lora lora-dropout pp2 zb-v dp2 shard1 bf16 eval
lora some-modules unpacked tp2 pp2 zb-v selective attention-dropout sgd
lora pp4 1f1b bf16 selective hidden-dropout
dpo copy pp2 1f1b dp2 shard1 selective from-pretrained attention-dropout clip eval
dpo smoothed tp2 pp2 1f1b bf16 full from-gpt2 math
dpo copy tp4 sp selective from-gpt2 eval math
dpo smoothed pp2 gpipe dp2 selective attention-dropout clip
dpo-lora tp2 sp pp2 zb-h1 dp2 shard1 bf16 selective from-gpt2 hidden-dropout sgd
dpo-lora lora-dropout tp2 attention-dropout clip
dpo-lora precomputed tp2 pp2 gpipe bf16 from-pretrained hidden-dropout eval
dpo-lora precomputed pp2 interleaved dp2 attention-dropout sgd
dpo-lora pp4 1f1b clip eval math
dpo-lora precomputed tp2 sp pp2 zb-h1 full clip math
dpo-lora lora-dropout pp2 interleaved dp2 shard1 bf16 full hidden-dropout clip math
pretrain tp2 sp qknorm clip compile
pretrain dp2 bf16 gpt2 tied hidden-dropout compile
pretrain pp2 interleaved layers4 documents full compile
sft compile
lora compile
resume pretrain tp2 dp2 selective window tied sgd math
resume pretrain pp2 1f1b dp2 bf16 gpt2 kv2 hidden-dropout reshard
resume lora lora-dropout tp4 sp bf16 full from-pretrained attention-dropout sgd
resume sft tp2 sp pp2 zb-h1 bf16 from-pretrained attention-dropout eval
resume dpo copy tp4 sp selective from-gpt2 eval math
"""
TOOLS = {
    "convert llama": "tools/convert_checkpoint.py --load {cases}/pretrain_qknorm_clip_eval/ck --save hf",
    "convert gpt2": "tools/convert_checkpoint.py --save hf "
    "--load {cases}/sft_unpacked_dp4_shard2_bf16_full_from-gpt2_hidden-dropout_clip_eval/ck",
    "merge lora": "tools/merge_lora.py --load {inputs}/llama --save hf "
    "--adapter {cases}/lora_pp4_1f1b_bf16_selective_hidden-dropout/ck",
}


@dataclass(frozen=True)
class Case:
    """One run: a line of words, or a command of a tool in which {cases} is the folder of the recorded cases.

    Attributes:
        words: its name, with spaces.
        tool: the command line of a tool, which trains nothing.
    """

    words: str
    tool: str | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.words.replace(" ", "_")

    @property
    def resumed(self) -> str | None:
        """The case from whose second step this one goes on."""
        return self.name.removeprefix("resume_") if self.words.startswith("resume ") else None

    @property
    def program(self) -> str:
        """The Python file, relative to the repository."""
        if self.tool:
            return self.tool.split()[0]
        return "pretrain_gpt.py" if "pretrain" in self.words.split() else "finetune.py"

    @property
    def processes(self) -> int:
        """How many it takes."""
        return math.prod(int(number) for number in re.findall(r"\b[tpd]p(\d)\b", self.words)) if not self.tool else 1

    def flags(self, out: Path) -> list[str]:
        """The command line. A later flag wins over an earlier one.

        Args:
            out: folder of the record.
        """
        text = self.tool.partition(" ")[2] if self.tool else self._training_flags()
        return text.format(inputs=out / "inputs", cases=out / "cases").split()

    def _training_flags(self) -> str:
        words = self.words.removeprefix("resume ").split()
        flags = [COMMON, KINDS[words[0]], *map(_flags_of, words[1:])]
        if self.resumed is not None:
            flags.append("--load auto" if self.program == "pretrain_gpt.py" else "--resume")
        return " ".join(flags)


def _flags_of(word: str) -> str:
    if word in WORDS:
        return WORDS[word]
    found = ((re.fullmatch(pattern, word), flags) for pattern, flags in PATTERNS.items())
    return next(flags.format(match[1]) for match, flags in found if match)


CASES = [Case(line) for line in RUNS.split("\n") if line] + [Case(words, tool) for words, tool in TOOLS.items()]
