"""Megatron's ``torch_dist`` checkpoints: ``table`` has names and arguments, ``read`` and ``write`` the tensors;
``torch_file`` reads what ``torch.save`` wrote without running it."""
