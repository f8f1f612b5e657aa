"""SageMaker training jobs: one request to the API through boto3, which validates it.

The image starts ``python -m smp.launch.backends.in_sagemaker``, so that it needs this package and no toolkit of
SageMaker's. Settings travel as hyper-parameters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.commands import pip_install
from smp.config.command_line.fields import as_text, did_you_mean
from smp.launch.backends.backend import ASKED, NOT_SUBMITTED, Backend, Facts, facts_artifact
from smp.launch.elastic import refuse
from smp.launch.job import Artifacts, Job, common_artifacts, flag
from smp.launch.library import collection, load_yaml
from smp.launch.stages import only_training

CHECKPOINTS, OUTPUT = "/opt/ml/checkpoints", "/opt/ml/output/data"
_ACTIVE = ("InProgress", "Stopping")
_LOGS = "/aws/sagemaker/TrainingJobs"
_HINT = f"cluster=sm_jobs needs boto3: {pip_install('boto3')}"


def artifacts(job: Job) -> Artifacts:
    """The files of a job."""
    only_training(job)
    section = _section(job)
    if unknown := [key for key in job.cluster if key != "sm_jobs_config"]:
        raise ConfigError(f"cluster.{unknown[0]}: there is no such key{did_you_mean(unknown[0], ['sm_jobs_config'])}")
    # The container's entry point is Python itself: no shell runs before it.
    for key in ("setup", "python"):
        if job.tree.get(key):
            raise ConfigError(f"{key}: {job.tree[key]} with cluster=sm_jobs, where the image brings all of it")
    if any((job.tree.get("git") or {}).values()):
        raise ConfigError("git: cluster=sm_jobs runs the code that is in the image")
    refuse(job.recipe, "cluster=sm_jobs", "a training job has as many machines as it asked for")
    request = _request(job, section)
    facts = facts_artifact(
        job, region=section.get("region"), wait=flag(dict(section), "wait", "cluster.sm_jobs_config.")
    )
    common = common_artifacts(job, "")
    # Hyper-parameters are shown in SageMaker's console.
    if any(name.startswith("SMP_ARGUMENT") for name in job.secrets):
        raise ConfigError(
            "training_cfg.script_args: a secret among them would be a hyper-parameter; give +env_vars.NAME=..."
        )
    private = {"secrets.json": json.dumps(job.secrets) + "\n"} if job.secrets else {}
    names = ("recipe.yaml", "settings.yaml", "notes.txt")
    kept: dict[str, str] = {name: common[name] for name in names if name in common}
    return {**kept, **private, "request.json": json.dumps(request, indent=1) + "\n", **facts}


def _section(job: Job) -> dict[str, Any]:
    """The section's settings, none of them unknown. Keys that HyperPod's launcher passes to the SDK's estimator are
    accepted."""
    section = job.cluster.get("sm_jobs_config")
    if not isinstance(section, Mapping):
        raise ConfigError(f"cluster.sm_jobs_config: expected keys and values, not {section!r}")
    known = load_yaml(collection() / "cluster" / "sm_jobs.yaml")["sm_jobs_config"]
    # additional_estimator_kwargs win: they are what HyperPod's launcher hands to the estimator.
    given = {**section, **(section.get("additional_estimator_kwargs") or {})}
    given.pop("additional_estimator_kwargs", None)
    if unknown := [key for key in given if key not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ConfigError(f"cluster.sm_jobs_config.{unknown[0]}: there is no such key{hint}")
    needs = {
        "container=IMAGE": job.tree.get("container"),
        "instance_type=ml.NAME": job.instance,
        "cluster.sm_jobs_config.role=ARN": given.get("role"),
        "cluster.sm_jobs_config.output_path=s3://BUCKET/FOLDER": given.get("output_path"),
    }
    if missing := [word for word, value in needs.items() if not value]:
        raise ConfigError(f"cluster=sm_jobs needs {', '.join(missing)}")
    # The recipe's time limit, or a day, SageMaker's own default.
    given["max_run"] = given.get("max_run") or job.recipe.seconds or 86400
    for key in ("max_run", "volume_size_gb"):
        if isinstance(given[key], bool) or not isinstance(given[key], int) or given[key] < 1:
            raise ConfigError(f"cluster.sm_jobs_config.{key}: {given[key]!r} is not a number above 0")
    return given


def _request(job: Job, section: Mapping[str, Any]) -> dict[str, Any]:
    """The request of CreateTrainingJob; the job's name is added on submission."""
    output = _s3("output_path", section.get("output_path"))
    assert job.instance is not None, "checked before"
    checkpoints = _s3(
        "checkpoint_s3_uri", section.get("checkpoint_s3_uri") or f"{output}/{job.recipe.name}/checkpoints"
    )
    request: dict[str, Any] = {
        "RoleArn": section["role"],
        "AlgorithmSpecification": {
            "TrainingImage": str(job.tree["container"]),
            # File systems are mounted: nothing is streamed.
            "TrainingInputMode": "FastFile" if not _file_system(section) else "File",
            "ContainerEntrypoint": ["python3", "-m", "smp.launch.backends.in_sagemaker"],
        },
        "HyperParameters": _hyper_parameters(job),
        "ResourceConfig": {
            "InstanceType": f"ml.{job.instance.name}",
            "InstanceCount": job.recipe.num_nodes,
            "VolumeSizeInGB": section["volume_size_gb"],
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": section["max_run"]},
        "OutputDataConfig": {"S3OutputPath": output},
        # SageMaker copies this folder to S3 while the job runs, and back when it is restarted.
        "CheckpointConfig": {"S3Uri": checkpoints, "LocalPath": CHECKPOINTS},
        "RetryStrategy": {"MaximumRetryAttempts": int(job.tree["max_tries"])},
        "RemoteDebugConfig": {
            "EnableRemoteDebug": flag(dict(section), "enable_remote_debug", "cluster.sm_jobs_config.")
        },
        "Environment": {**job.defaults, **job.environment},
    }
    channels = _channels(section)
    tensorboard = section.get("tensorboard_config") or {}
    subnets, security_groups = section.get("subnets"), section.get("security_group_ids")
    if channels:
        request["InputDataConfig"] = channels
    if tensorboard.get("output_path"):
        request["TensorBoardOutputConfig"] = {
            "S3OutputPath": _s3("tensorboard_config.output_path", tensorboard["output_path"]),
            "LocalPath": tensorboard.get("container_logs_path") or "/opt/ml/output/tensorboard",
        }
    if subnets and security_groups:
        request["VpcConfig"] = {"Subnets": list(subnets), "SecurityGroupIds": list(security_groups)}
    elif subnets or security_groups:
        raise ConfigError("cluster.sm_jobs_config: subnets and security_group_ids go together")
    return request


def _hyper_parameters(job: Job) -> dict[str, str]:
    """Hyper-parameters as text, as the API requires; ``smp.launch.backends.in_sagemaker`` reads them."""
    recipe = job.recipe
    if recipe.task == "custom":
        return {"smp_task": "custom", "smp_devices": str(recipe.devices), "smp_script": json.dumps(recipe.script)}
    values = {name: _as_parameter(as_text(value)) for name, value in recipe.settings.items()}
    own = {"smp_task": recipe.task, "smp_devices": str(recipe.devices), "save": CHECKPOINTS, "log_dir": OUTPUT}
    return own | values


def _as_parameter(text: str) -> str:
    """The text with JSON quotes if it begins with a quote of its own, which would be taken for the SDK's."""
    return json.dumps(text) if text[:1] == '"' else text


def _s3(key: str, value: Any) -> str:
    if not str(value).startswith("s3://"):
        raise ConfigError(f"cluster.sm_jobs_config.{key}: {value} is no s3://...")
    return str(value).rstrip("/")


def _file_system(section: Mapping[str, Any]) -> dict[str, Any] | None:
    system = (section.get("inputs") or {}).get("file_system") or {}
    return dict(system) if system.get("id") else None


def _channels(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Input channels; each becomes a folder of /opt/ml/input/data."""
    s3 = {name: uri for name, uri in ((section.get("inputs") or {}).get("s3") or {}).items() if uri}
    system = _file_system(section)
    if s3 and system:
        raise ConfigError("cluster.sm_jobs_config.inputs: give s3 or file_system, not both")
    # A file system is one channel, in S3 each name is one.
    if system:
        source: dict[str, Any] = {
            "FileSystemId": system["id"],
            "FileSystemType": system.get("type"),
            "FileSystemAccessMode": "rw",
            "DirectoryPath": system.get("directory_path"),
        }
        if missing := [key for key, value in source.items() if value is None]:
            raise ConfigError(f"cluster.sm_jobs_config.inputs.file_system: {missing[0]} is missing")
        return [{"ChannelName": "train", "DataSource": {"FileSystemDataSource": source}}]
    return [
        {
            "ChannelName": name,
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": _s3(f"inputs.s3.{name}", uri)}},
        }
        for name, uri in s3.items()
    ]


def _client(facts: Facts, service: str) -> Any:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ConfigError(_HINT) from None
    try:
        return boto3.client(service, region_name=facts["region"])
    except BotoCoreError as error:
        raise ConfigError(f"cluster=sm_jobs: {error}; cluster.sm_jobs_config.region gives the region") from None


def _call(facts: Facts, action: str, service: str = "sagemaker", **words: Any) -> Any:
    """One request; an error of AWS becomes one line."""
    client = _client(facts, service)
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return getattr(client, action)(**words)
    except (BotoCoreError, ClientError) as error:
        # Messages of AWS have several lines; an error here is one.
        raise ConfigError(f"cluster=sm_jobs: {' '.join(str(error).split())}") from None


def busy(folder: Path, facts: Facts) -> str | None:
    """The status of a training job that has not ended; None otherwise."""
    status = facts.get("id") and _described(facts)["TrainingJobStatus"]
    return f"{status} ({facts['id']})" if status in _ACTIVE else None


def submit(folder: Path, facts: Facts) -> tuple[int, Facts]:
    """CreateTrainingJob under a new name; checkpoints of the job before are at the same place."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    if (secrets := folder / "secrets.json").is_file():
        request["Environment"] |= json.loads(secrets.read_text(encoding="utf-8"))
    # Names are unique for ever, and have at most 63 characters.
    name = f"{facts['name'][:40]}-{time.strftime('%Y%m%d-%H%M%S')}"
    _call(facts, "create_training_job", TrainingJobName=name, **request)
    print(f"training job {name}")
    known = {**facts, "id": name}
    while facts["wait"] and (status := _described(known)["TrainingJobStatus"]) in _ACTIVE:
        # Jobs run for hours, and requests to the API are throttled.
        time.sleep(20)
    code = 0 if not facts["wait"] or status == "Completed" else 1
    return code, {"id": name}


def _described(facts: Facts) -> Any:
    if not facts.get("id"):
        raise ConfigError(f"{facts['name']}: not submitted")
    return _call(facts, "describe_training_job", TrainingJobName=facts["id"])


def state(folder: Path, facts: Facts) -> str:
    """The job's state by SageMaker."""
    if not facts.get("id"):
        return NOT_SUBMITTED
    found = _described(facts)
    reason = found.get("FailureReason")
    return f"{found['TrainingJobStatus']} ({facts['id']})" + (f": {reason}" if reason else "")


def logs(folder: Path, facts: Facts, more: bool) -> int:
    """Show the CloudWatch logs of all nodes, and with ``more`` new lines until the job ends."""
    read_to: dict[str, str] = {}
    last = False
    while not last:
        # Asked first: lines written up to the end are printed in the last round.
        last = not more or _described(facts)["TrainingJobStatus"] not in _ACTIVE
        for line in _new_lines(facts, read_to):
            print(line, flush=True)
        if not last:
            time.sleep(5)
    if not read_to:
        print(f"{facts['id']} is {_described(facts)['TrainingJobStatus']} and has written nothing yet")
    return 0


def _new_lines(facts: Facts, read_to: dict[str, str]) -> Iterator[str]:
    """Lines written since ``read_to``, which maps the name of a node's stream to the token of the last reading and is
    updated."""
    words = {"logGroupName": _LOGS, "logStreamNamePrefix": f"{facts['id']}/"}
    answer = _call(facts, "describe_log_streams", "logs", **words)
    streams = answer["logStreams"]
    while "nextToken" in answer:
        answer = _call(facts, "describe_log_streams", "logs", nextToken=answer["nextToken"], **words)
        streams += answer["logStreams"]
    for name in (stream["logStreamName"] for stream in streams):
        node = name.partition("/")[2].partition("/")[0] or name
        while True:
            token = {"nextToken": read_to[name]} if name in read_to else {}
            found = _call(
                facts, "get_log_events", "logs", logGroupName=_LOGS, logStreamName=name, startFromHead=True, **token
            )
            yield from (
                f"{node}: {event['message']}" if len(streams) > 1 else event["message"] for event in found["events"]
            )
            unchanged = read_to.get(name) == found["nextForwardToken"]  # an unchanged token means the end of the stream
            read_to[name] = found["nextForwardToken"]
            if unchanged:
                break


def cancel(folder: Path, facts: Facts) -> str:
    """StopTrainingJob: sends SIGTERM, on which the run saves, and kills after 120 seconds."""
    _described(facts)
    _call(facts, "stop_training_job", TrainingJobName=facts["id"])
    return ASKED


BACKEND = Backend(artifacts=artifacts, busy=busy, submit=submit, state=state, logs=logs, cancel=cancel)
