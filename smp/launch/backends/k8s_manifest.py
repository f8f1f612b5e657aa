"""Kubernetes manifests, one file per job. The default kind, an indexed Job with a headless Service, needs only
Kubernetes; PyTorchJob (Kubeflow's training operator v1) and HyperPodPyTorchJob (SageMaker's) wrap the same pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import did_you_mean
from smp.launch.backends.backend import facts_artifact
from smp.launch.backends.k8s_monitoring import NOT_WATCHED, log_monitoring
from smp.launch.backends.k8s_names import (
    check_env_from,
    check_label,
    check_labels,
    check_mounts,
    check_name,
    check_quantity,
    check_subdomain,
    check_tolerations,
    termination_seconds,
    volume_name,
)
from smp.launch.elastic import refuse
from smp.launch.job import Artifacts, Job, common_artifacts, flag, to_yaml
from smp.launch.library import collection, load_yaml
from smp.launch.secrets import is_private
from smp.launch.stages import only_training

CONFIG, PORT = "/config", 29500
KINDS = ("Job", "PyTorchJob", "HyperPodPyTorchJob")
_FILES = ("settings.yaml", "train.sh", "supervise.py")
"""Files of the job's folder that a pod needs."""
_CLEAN = ("All", "Running", "None")
_RESTARTS = {
    "OnFailure": None,
    "Never": None,
    "Always": "starts a training again that has ended well; take OnFailure",
    "ExitCode": "takes the code of a run that is to be started again for its end; take OnFailure",
}
"""Restart policies of a PyTorchJob; the text says why one cannot be used."""
_NAME = "app.kubernetes.io/name"
_KUEUE = "kueue.x-k8s.io/queue-name"
Object = dict[str, Any]


def artifacts(job: Job) -> Artifacts:
    """The files of a job."""
    only_training(job)
    cluster = job.cluster
    known = load_yaml(collection() / "cluster" / "k8s.yaml")
    if unknown := [key for key in cluster if key not in known]:
        raise ConfigError(f"cluster.{unknown[0]}: there is no such key{did_you_mean(unknown[0], known)}")
    kind = "Job" if cluster.get("kind") is None else cluster["kind"]
    if kind not in KINDS:
        raise ConfigError(f"cluster.kind: {kind} is none of {', '.join(KINDS)}")
    if not job.tree.get("container"):
        raise ConfigError("container is missing: cluster=k8s runs an image")
    _check_folder(job)
    name = job.recipe.name
    check_name(name, kind, job.recipe.num_nodes)
    check_label("namespace", cluster.get("namespace"))
    # The first pod of each kind is where the others meet.
    host = f"{name}-0.{name}" if kind == "Job" else f"{name}-master-0"
    words = f"--rdzv-backend c10d --rdzv-endpoint {host}:{PORT} --rdzv-id {name}"
    # HyperPod's operator talks to its own agent, which takes torchrun's place and brings its rendezvous
    agent = kind == "HyperPodPyTorchJob"
    if agent:
        refuse(job.recipe, f"kind={kind}", "its agent counts nodes in its own way")
    job = _with_notes(job, kind)
    common = common_artifacts(job, "" if agent else words, files=CONFIG, runner="hyperpodrun" if agent else None)
    files = {file: common[file] for file in _FILES if file in common}
    manifest = [_config_map(job, files), *_workload(job, kind, _is_private(files))]
    secret = {"secret.yaml": to_yaml(_secret(job))} if job.secrets else {}
    facts = facts_artifact(
        job,
        namespace=cluster["namespace"],
        context=cluster.get("kube_context"),
        resource=_resource(kind, name),
        pods=f"{_NAME}={_metadata(job)['labels'][_NAME]}",
        nodes=job.recipe.num_nodes,
    )
    return {**common, **secret, "manifest.yaml": "---\n".join(map(to_yaml, manifest)), **facts}


def _check_folder(job: Job) -> None:
    """Raise ConfigError where checkpoints would be lost with the pod."""
    save = job.recipe.settings.get("save")
    folder = str(save or job.folder)
    mounts = [_mount_path(volume) for volume in [*_volumes(job, "volumes"), *_claims(job)]]
    # With a slash: /data2 is not below /data.
    held = any(folder == mount or folder.startswith(mount + "/") for mount in mounts if mount)
    if not held and "://" not in folder and job.recipe.task != "custom":
        raise ConfigError(
            f"{'recipes.save' if save else 'base_results_dir'}: {folder} is on none of "
            "cluster.persistent_volume_claims and cluster.volumes, so checkpoints would go with the pod; give one "
            "whose mountPath holds it"
        )


def _volumes(job: Job, key: str) -> list[Object]:
    found = [volume for volume in _list(job, key) if volume is not None]
    needs = {"volumes": ("volumeName", "hostPath", "mountPath"), "persistent_volume_claims": ("claimName", "mountPath")}
    for volume in found:
        if not isinstance(volume, Mapping) or set(volume) != set(needs[key]):
            raise ConfigError(f"cluster.{key}: {volume!r} must have {', '.join(needs[key])}")
        if missing := [name for name in needs[key] if not isinstance(volume[name], str) or not volume[name]]:
            raise ConfigError(f"cluster.{key}: {missing[0]} of {volume!r} is no text")
    return found


def _claims(job: Job) -> list[Object]:
    return _volumes(job, "persistent_volume_claims")


def _mount_path(volume: Object) -> str:
    """The mount path with its leading slash, which HyperPod's own example leaves out."""
    return "/" + str(volume["mountPath"]).strip("/")


def _list(job: Job, key: str) -> list[Any]:
    value = job.cluster.get(key) or []
    if not isinstance(value, list):
        raise ConfigError(f"cluster.{key}: expected a list, not {value!r}")
    return value


def _mapping(job: Job, key: str) -> Object:
    value = job.cluster.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"cluster.{key}: expected keys and values, not {value!r}")
    return dict(value)


def _metadata(job: Job, name: str | None = None) -> Object:
    labels = {_NAME: job.recipe.name, **_mapping(job, "custom_labels")}
    if job.cluster.get("queue_name"):
        # Kueue admits jobs by this label.
        labels[_KUEUE] = job.cluster["queue_name"]
    return _set(
        name=name or job.recipe.name,
        namespace=job.cluster["namespace"],
        labels=check_labels("custom_labels", labels),
        annotations=check_labels("annotations", _mapping(job, "annotations"), values=False) or None,
    )


def _secret(job: Job) -> Object:
    metadata = _metadata(job, f"{job.recipe.name}-secrets")
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": job.secrets}


def _config_map(job: Job, files: Mapping[str, str]) -> Object:
    """The resolved recipe and the scripts that run it, mounted under /config of every pod; a Secret where URLs in it
    have passwords."""
    if _is_private(files):
        return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job), "stringData": dict(files)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "data": dict(files)}


def _is_private(files: Mapping[str, str]) -> bool:
    return any(is_private(text) for name, text in files.items() if name != "supervise.py")


def _workload(job: Job, kind: str, private: bool) -> list[Object]:
    nodes, metadata = job.recipe.num_nodes, _metadata(job)
    tries = int(job.tree["max_tries"])
    pod = {"metadata": {"labels": metadata["labels"]}, "spec": _pod(job, kind, private)}
    clean = job.cluster.get("cleanPodPolicy")
    if clean not in (None, *_CLEAN):
        raise ConfigError(f"cluster.cleanPodPolicy: {clean} is none of {', '.join(_CLEAN)}")
    if kind == "Job":
        if clean is not None:
            raise ConfigError(f"cluster.cleanPodPolicy: {clean} goes with the kinds PyTorchJob and HyperPodPyTorchJob")
        return [_service(job), _job(job, pod, tries)] if nodes > 1 else [_job(job, pod, tries)]
    if kind == "PyTorchJob":
        restart = job.cluster.get("restartPolicy") or "OnFailure"
        # With the operator's default, None, pods of a failed job would go on, and so would their
        # restarts.
        policy = {"cleanPodPolicy": clean or "Running"}
        roles = {"Master": 1, **({"Worker": nodes - 1} if nodes > 1 else {})}
        # The operator injects its own rendezvous into containers named pytorch; torchrun's flags
        # win over it.
        specs = {role: {"replicas": n, "restartPolicy": restart, "template": pod} for role, n in roles.items()}
        # The operator counts the restarts of all pods, and one lost process ends all of them.
        spec: Object = {"runPolicy": {"backoffLimit": tries * nodes, **policy}, "pytorchReplicaSpecs": specs}
        return [{"apiVersion": "kubeflow.org/v1", "kind": kind, "metadata": metadata, "spec": spec}]
    spec = {
        "nprocPerNode": str(job.recipe.devices),
        # HyperPod's own restarts: a new try of all pods.
        "runPolicy": {"jobMaxRetryCount": tries, **_set(cleanPodPolicy=clean), **_monitoring(job)},
        "replicaSpecs": [{"name": "pods", "replicas": nodes, "template": pod}],
    }
    return [{"apiVersion": "sagemaker.amazonaws.com/v1", "kind": kind, "metadata": metadata, "spec": spec}]


def _monitoring(job: Job) -> Object:
    """HyperPod's rules for log lines of a run; {} for a user's own script, whose lines are not known."""
    rules = log_monitoring(job.cluster.get("log_monitoring")) if job.recipe.task != "custom" else None
    return {} if rules is None or job.recipe.num_nodes > 1 else {"logMonitoringConfiguration": rules}


def _with_notes(job: Job, kind: str) -> Job:
    """The job with notes where rules for log lines were asked for (also by default) and left out, or where tries have
    no effect."""
    recipe, notes = job.recipe, list(job.recipe.notes)
    watched = recipe.num_nodes == 1 or recipe.task == "custom" or job.cluster.get("log_monitoring") is None
    if kind == "HyperPodPyTorchJob" and not watched:
        notes.append(NOT_WATCHED)
    if kind == "PyTorchJob" and job.cluster.get("restartPolicy") == "Never":
        notes.append("max_tries: with cluster.restartPolicy=Never no pod starts again")
    return replace(job, recipe=replace(recipe, notes=tuple(notes)))


def _service(job: Job) -> Object:
    """A headless Service: gives the pods of the Job names that the others can look up."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # names must resolve before pods are ready: they meet first
        "selector": {"job-name": job.recipe.name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job(job: Job, pod: Object, tries: int) -> Object:
    nodes = job.recipe.num_nodes
    # The pods' hostnames are <job>-<index>.<subdomain>.
    pod["spec"]["subdomain"] = job.recipe.name if nodes > 1 else None
    pod["spec"] = _set(**pod["spec"])
    spec = {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": tries * nodes,  # one lost process ends the pods of all nodes
        "podFailurePolicy": {
            "rules": [
                # 2: bad settings fail again. A pod that the cluster took away is not the run's
                # fault.
                {"action": "FailJob", "onExitCodes": {"containerName": "pytorch", "operator": "In", "values": [2]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def _pod(job: Job, kind: str, private: bool) -> Object:
    cluster = job.cluster
    name = job.recipe.name
    files: Object = {"secret": {"secretName": name}} if private else {"configMap": {"name": name}}
    volumes: list[Object] = [
        {"name": "config", **files},
        # The default /dev/shm of a container is 64 MB: too small for data workers and NCCL.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": check_quantity("shm_size", cluster["shm_size"])}},
    ]
    mounts: list[Object] = [{"name": "config", "mountPath": CONFIG}, {"name": "shm", "mountPath": "/dev/shm"}]
    for volume in _volumes(job, "volumes"):
        check_label("volumes.volumeName", volume["volumeName"])
        if volume["volumeName"] in [other["name"] for other in volumes]:
            raise ConfigError(f"cluster.volumes: the volumeName {volume['volumeName']} is taken; give another")
        volumes.append({"name": volume["volumeName"], "hostPath": {"path": volume["hostPath"]}})
        mounts.append({"name": volume["volumeName"], "mountPath": _mount_path(volume)})
    claims: dict[str, str] = {}
    for claim in _claims(job):
        wanted = check_subdomain("persistent_volume_claims.claimName", claim["claimName"])
        if wanted not in claims:  # a claim may be mounted at several paths, but is one volume
            claims[wanted] = volume_name(wanted, [other["name"] for other in volumes])
            volumes.append({"name": claims[wanted], "persistentVolumeClaim": {"claimName": wanted}})
        mounts.append({"name": claims[wanted], "mountPath": _mount_path(claim)})
    check_mounts(mount["mountPath"] for mount in mounts)
    host = flag(cluster, "hostNetwork", "cluster.")
    # Pods of a Job are never restarted in place: a new pod meets the others anew.
    restart = cluster.get("restartPolicy") or "Never"
    if restart not in _RESTARTS:
        raise ConfigError(f"cluster.restartPolicy: {restart} is none of {', '.join(_RESTARTS)}")
    own_codes = restart == "ExitCode" and job.recipe.task == "custom"
    if kind == "PyTorchJob" and not own_codes and (why := _RESTARTS[restart]):
        raise ConfigError(f"cluster.restartPolicy: {restart} {why}")
    if kind != "PyTorchJob" and restart != "Never":
        raise ConfigError(
            f"cluster.restartPolicy: {restart} goes with the kind PyTorchJob; of a {kind} pods are new ones"
        )
    return _set(
        restartPolicy="Never" if kind == "Job" else None,
        terminationGracePeriodSeconds=termination_seconds(cluster),
        hostNetwork=host or None,
        # With the host's network, names of Services resolve only under this policy.
        dnsPolicy="ClusterFirstWithHostNet" if host else None,
        serviceAccountName=_named(job, "service_account_name"),
        priorityClassName=_named(job, "priority_class_name"),
        nodeSelector=check_labels("nodeSelector", _selector(job)) or None,
        affinity=_affinity(job),
        tolerations=_checked(job, "tolerations", check_tolerations),
        containers=[_container(job, mounts)],
        volumes=volumes,
    )


def _named(job: Job, key: str) -> str | None:
    """The name of a cluster object; None: none is wanted."""
    value = job.cluster.get(key)
    return None if value is None else check_subdomain(key, value)


def _checked(job: Job, key: str, check: Callable[[list[Any]], None]) -> list[Any] | None:
    """A checked list of objects; None: empty."""
    found = _list(job, key)
    check(found)
    return found or None


def _selector(job: Job) -> Object:
    own = _mapping(job, "nodeSelector")
    instance = job.tree.get("instance_type")
    if instance is None:
        return own
    if job.cluster.get("kind") == "HyperPodPyTorchJob":  # HyperPod labels its nodes with "ml." in front
        instance = f"ml.{str(instance).removeprefix('ml.')}"
    return {"node.kubernetes.io/instance-type": instance, **own}


def _container(job: Job, mounts: list[Object]) -> Object:
    cluster = job.cluster
    if cluster.get("pullPolicy") not in ("Always", "IfNotPresent", "Never"):
        raise ConfigError(f"cluster.pullPolicy: {cluster.get('pullPolicy')} is none of Always, IfNotPresent, Never")
    # pre_script runs in the same shell: what it exports is seen by the training.
    script = "\n".join([*map(str, _list(job, "pre_script")), f"bash {CONFIG}/train.sh"])
    # The exit code of the training must survive the commands after it: it decides about a restart.
    if after := _list(job, "post_script"):
        script += " && code=0 || code=$?\n" + "\n".join(map(str, after)) + "\nexit $code"
    else:  # exec: the pod's first process gets SIGTERM
        script = script.replace(f"bash {CONFIG}", f"exec bash {CONFIG}")
    # IPC_LOCK: RDMA pins memory.
    privileged = flag(cluster, "privileged", "cluster.")
    security: Object = {"privileged": True} if privileged else {"capabilities": {"add": ["IPC_LOCK"]}}
    resources = _resources(job)
    secrets = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{job.recipe.name}-secrets", "key": key}}}
        for key in job.secrets
    ]
    return _set(
        name="pytorch",
        image=_image(job),
        imagePullPolicy=cluster["pullPolicy"],
        command=["bash", "-c", script],
        env=secrets or None,
        envFrom=_checked(job, "envFrom", check_env_from),
        resources=resources or None,
        securityContext=security,
        volumeMounts=mounts,
    )


def _image(job: Job) -> str:
    image = str(job.tree["container"])
    if image.split() != [image]:
        raise ConfigError(f"container: {image!r} has blanks, which no image's name has")
    return image


def _resources(job: Job) -> Object:
    """Resources of a pod: the devices, overridden by cluster.resources."""
    given = _mapping(job, "resources")
    if unknown := set(given) - {"limits", "requests"}:
        raise ConfigError(f"cluster.resources.{sorted(unknown)[0]}: there are limits and requests")
    own: dict[str, Object] = {}
    for kind in ("limits", "requests"):
        of_kind = given.get(kind) or {}
        if not isinstance(of_kind, Mapping):
            raise ConfigError(f"cluster.resources.{kind}: expected keys and values, not {of_kind!r}")
        own[kind] = {
            name: None if amount is None else check_quantity(f"resources.{kind}.{name}", amount)
            for name, amount in of_kind.items()
        }
    # Of devices (names with a slash) requests must equal limits, or the cluster refuses the pod:
    # given for one, it counts for both.
    both = {name: n for kind in ("requests", "limits") for name, n in own[kind].items() if "/" in name}
    amounts = {kind: _devices(job) | own[kind] | both for kind in own}
    found = {kind: {name: n for name, n in amount.items() if n is not None} for kind, amount in amounts.items()}
    return {kind: amount for kind, amount in found.items() if amount}


def _devices(job: Job) -> Object:
    """GPUs, unless the run uses none, and EFA where the machine has it: without it NCCL would silently use TCP."""
    if job.environment.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1") or (job.instance and not job.instance.devices):
        return {}
    # A run on one node has nothing to send through EFA.
    efa = job.instance.efa if job.instance is not None and job.recipe.num_nodes > 1 else 0
    return {"nvidia.com/gpu": str(job.recipe.devices)} | ({"vpc.amazonaws.com/efa": str(efa)} if efa else {})


def _affinity(job: Job) -> Object | None:
    selector = _mapping(job, "label_selector")
    if unknown := set(selector) - {"required", "preferred", "weights"}:
        raise ConfigError(f"cluster.label_selector.{sorted(unknown)[0]}: there are required, preferred and weights")
    # Kubernetes weighs preferred terms from 1 to 100; without weights all count alike.
    required, preferred = selector.get("required") or {}, selector.get("preferred") or {}
    weights = selector.get("weights") or [100] * len(preferred)
    if not isinstance(required, Mapping) or not isinstance(preferred, Mapping) or len(weights) != len(preferred):
        raise ConfigError(
            "cluster.label_selector: required and preferred are {label: [values]}, weights one per preferred"
        )
    affinity = _set(
        requiredDuringSchedulingIgnoredDuringExecution={"nodeSelectorTerms": [_term(required)]} if required else None,
        preferredDuringSchedulingIgnoredDuringExecution=[
            {"weight": weight, "preference": _term({label: values})}
            for weight, (label, values) in zip(weights, preferred.items(), strict=True)
        ]
        or None,
    )
    return {"nodeAffinity": affinity} if affinity else None


def _term(labels: Mapping[str, Any]) -> Object:
    wanted = {label: values if isinstance(values, list) else [values] for label, values in labels.items()}
    return {
        "matchExpressions": [
            {"key": label, "operator": "In", "values": [str(value) for value in values]}
            for label, values in wanted.items()
        ]
    }


def _set(**values: Any) -> Object:
    """A mapping without None values."""
    return {key: value for key, value in values.items() if value is not None}


def _resource(kind: str, name: str) -> str:
    group = {"Job": "job.batch", "PyTorchJob": "pytorchjob.kubeflow.org"}
    return f"{group.get(kind, 'hyperpodpytorchjob.sagemaker.amazonaws.com')}/{name}"
