"""The files: ``manifest`` (JSON; its words are ``entries``, its limits ``validate_manifest``) and safetensors
(``tensor_file``, ``tensor_bytes``), with a checksum for each shard."""
