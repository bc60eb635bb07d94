"""What was asked for on the command line -> a frozen plan: which tasks, and with what environment each.

Nothing here touches the machine; ports, processors and the environment are passed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist import proxies, tf_config
from tfdist.cluster import Cluster, Task, split_address
from tfdist.errors import LaunchError
from tfdist.launch.share import Share

# What tells a task about its launcher (read by tfdist.process.LaunchInfo). A run started inside a task of another run
# must not hear of the outer one.
TASK_VARIABLES = (
    "TFDIST_RUN_DIR",
    "TFDIST_LOCAL_INDEX",
    "TFDIST_LOCAL_COUNT",
    "TFDIST_ATTEMPT",
    "TFDIST_LAST_FAILURE",
    "TFDIST_START_TIMEOUT_S",
    "TFDIST_STEP_TIMEOUT_S",
)
# The launcher's own settings; tasks do not see them.
SETTING_PREFIX = "TFDIST_RUN_"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# Behind the script they are the script's, which is seldom what was meant.
OFTEN_MISPLACED = (
    "--workers",
    "--ps",
    "--chief",
    "--evaluator",
    "--tasks-per-host",
    "--tasks_per_host",
    "--nproc-per-node",
    "--nproc_per_node",
    "--log-dir",
    "--max-restarts",
    "--max_restarts",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is to run, and how.

    Attributes:
        command: A script and its arguments, or "-m", a module and its arguments.
        workers: Number of worker tasks.
        ps: Number of parameter servers; with any, a chief is added.
        chief: Whether a chief trains beside the workers.
        evaluator: Whether a task beside the cluster evaluates its checkpoints.
        share: This host's part of a cluster of several hosts, instead of a cluster of workers, ps and a chief here.
        log_dir: Folder for one log file per task and the summary.
        raw: Whether TensorFlow's start-up noise is shown.
        pty: Whether the chief may have a terminal of its own, where the launcher has one.
        start_timeout_s: Time for all tasks to meet, from the first that asks for the others.
        step_timeout_s: Time that a task waits for another in a step; None leaves it to the tasks.
        shutdown_timeout_s: Time from a request to end until SIGKILL.
        threads_per_task: CPU threads per task; None shares the processors out.
        max_restarts: How often tasks may be started again after a failure, all of them or one.
    """

    command: tuple[str, ...]
    workers: int = 1
    ps: int = 0
    chief: bool = False
    evaluator: bool = False
    share: Share | None = None
    log_dir: str | None = None
    raw: bool = False
    pty: bool = True
    start_timeout_s: float = 300.0
    step_timeout_s: float | None = None
    shutdown_timeout_s: float = 5.0
    threads_per_task: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if not self.command or not self.command[0] or self.command == ("-m",):
            raise LaunchError("there is no script to run: python -m tfdist.run --workers 2 train.py")
        alone = self.chief and not self.ps  # one task, of its own name
        for name, value, least in (
            ("workers", self.workers, 0 if alone else 1),
            ("ps", self.ps, 0),
            ("max-restarts", self.max_restarts, 0),
        ):
            if value < least:
                raise LaunchError(f"--{name} must be at least {least}, not {value}")
        if self.threads_per_task is not None and self.threads_per_task < 1:
            raise LaunchError(f"--threads-per-task must be at least 1, not {self.threads_per_task}")
        for name, seconds in (
            ("start-timeout", self.start_timeout_s),
            ("step-timeout", self.step_timeout_s),
            ("shutdown-timeout", self.shutdown_timeout_s),
        ):
            # Not `<= 0`: that lets nan through.
            if seconds is not None and not 0 < seconds < 1e9:
                raise LaunchError(f"--{name} must be a number of seconds above 0, not {seconds:g}")

    @property
    def name(self) -> str:
        """The script or module, as the user wrote it."""
        return self.command[1] if self.command[0] == "-m" else self.command[0]

    @property
    def has_chief(self) -> bool:
        return self.chief or self.ps > 0

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks of this host in the order of their local indices, the chief first."""
        if self.share is not None:
            return self.share.tasks
        counts = {
            "chief": int(self.has_chief),
            "worker": self.workers,
            "ps": self.ps,
            "evaluator": int(self.evaluator),
        }
        return tuple(Task(job, i) for job, count in counts.items() for i in range(count))

    @property
    def task_count(self) -> int:
        return len(self.tasks)

    @property
    def port_count(self) -> int:
        """How many of them listen; an evaluator does not."""
        return sum(task.type != "evaluator" for task in self.tasks)


@dataclass(frozen=True)
class TaskPlan:
    """One task: its name, its number on this host, its address (an evaluator has none), and its environment."""

    task: Task
    local_index: int
    address: str
    environ: Mapping[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.task} at {self.address}" if self.address else str(self.task)

    def again(self, attempt: int, last_failure: str) -> TaskPlan:
        """Returns the plan of a later start of the same task."""
        told = {"TFDIST_ATTEMPT": str(attempt), "TFDIST_LAST_FAILURE": last_failure}
        return dataclasses.replace(self, environ={**self.environ, **told})


@dataclass(frozen=True)
class Plan:
    """All tasks of a run on this host, the chief first, and what the user should be told about them."""

    options: Options
    cluster: Cluster
    tasks: tuple[TaskPlan, ...]
    notes: tuple[str, ...]

    @property
    def chief(self) -> Task:
        return self.cluster.chief

    @property
    def trains(self) -> tuple[Task, ...]:
        """The tasks of all hosts that train together, where this host has any of them."""
        training = self.cluster.training_tasks
        return training if any(plan.task in training for plan in self.tasks) else ()


def make_plan(
    options: Options,
    *,
    ports: Sequence[int] = (),
    run_dir: str,
    environ: Mapping[str, str],
    processors: int,
    gpus: Sequence[str] = (),
    host: str = "127.0.0.1",
) -> Plan:
    """Returns the plan of what `options` ask for, on this host.

    Args:
        options: What was asked for.
        ports: One free port per task that listens; a share of a cluster has its ports already.
        run_dir: The run's private folder.
        environ: The launcher's environment; each task gets a copy with changes.
        processors: How many processors this process may use.
        gpus: Names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES.
        host: The address the tasks use among themselves.
    """
    share = options.share or _whole_cluster(options, ports, host)
    cluster, tasks = share.cluster, share.tasks
    common = {name: value for name, value in environ.items() if not _is_ours(name)}
    notes = _notes_on_hosts(share)
    if common.pop("TF_CONFIG", None) and options.share is None:
        notes.append("TF_CONFIG was set and is replaced for the tasks; unset it to lose this line")
    swallowed = [word for word in options.command if word.partition("=")[0] in OFTEN_MISPLACED]
    if swallowed:
        notes.append(f"{swallowed[0]} stands behind the script, which gets it; a flag of the launcher stands before it")
    threads = _threads(options, common, processors, len(tasks))
    if threads:
        intra = threads["TF_NUM_INTRAOP_THREADS"]
        notes.append(f"each task computes on {intra} of {processors} CPU threads")
    common.update(threads)
    common.update(proxies.exceptions(common, _hosts(cluster)))
    common.update(_words_to_tasks(options, run_dir, len(tasks)))
    gpu_of = _gpu_of_each(share, gpus, notes, has_own_cluster=options.share is None)
    plans = tuple(
        TaskPlan(
            task=task,
            local_index=i,
            address="" if task.type == "evaluator" else cluster.address(task),
            environ={
                **common,
                **gpu_of.get(task, {}),
                "TF_CONFIG": tf_config.build(cluster, task, share.extra),
                "TFDIST_LOCAL_INDEX": str(i),
            },
        )
        for i, task in enumerate(tasks)
    )
    return Plan(options=options, cluster=cluster, tasks=plans, notes=tuple(notes))


def _whole_cluster(options: Options, ports: Sequence[int], host: str) -> Share:
    cluster = tf_config.local_cluster(
        workers=options.workers, ps=options.ps, chief=options.has_chief, ports=ports, host=host
    )
    return Share(cluster, options.tasks)


def _hosts(cluster: Cluster) -> list[str]:
    return list(dict.fromkeys(split_address(cluster.address(task))[0] for task in cluster.tasks))


def _notes_on_hosts(share: Share) -> list[str]:
    if share.hosts < 2:
        return []
    each = f"{share.tasks_per_host} task{'s' * (share.tasks_per_host > 1)}"
    return [
        f"TF_CONFIG has {share.hosts} entries; each that trains is taken to run {each}, on every host alike "
        "(--tasks-per-host K says another number)"
    ]


def _is_ours(name: str) -> bool:
    return name in TASK_VARIABLES or name.startswith(SETTING_PREFIX)


def _words_to_tasks(options: Options, run_dir: str, count: int) -> dict[str, str]:
    words = {
        "TFDIST_RUN_DIR": run_dir,
        "TFDIST_LOCAL_COUNT": str(count),
        "TFDIST_ATTEMPT": "0",
        "TFDIST_START_TIMEOUT_S": f"{options.start_timeout_s:g}",
        # The launcher holds each port until the end; TensorFlow's server joins it.
        "TF_GRPC_REUSE_PORT": "1",
    }
    if options.step_timeout_s is not None:
        words["TFDIST_STEP_TIMEOUT_S"] = f"{options.step_timeout_s:g}"
    return words


def _threads(options: Options, environ: Mapping[str, str], processors: int, tasks: int) -> dict[str, str]:
    """Thread settings that share the processors among the tasks, where the user has set none."""
    if options.threads_per_task is None and (tasks == 1 or any(environ.get(name) for name in THREAD_VARIABLES)):
        return {}
    intra = options.threads_per_task or max(1, processors // tasks)
    # One thread for whole ops would let an op that waits for its peers keep the others from running.
    inter = max(2, intra)
    return dict(zip(THREAD_VARIABLES, map(str, (intra, intra, inter)), strict=True))


def _gpu_of_each(
    share: Share, gpus: Sequence[str], notes: list[str], *, has_own_cluster: bool
) -> dict[Task, dict[str, str]]:
    """One GPU for each task that computes; none for the others, which would fill its memory for nothing."""
    if not gpus:
        return {}
    training = share.cluster.training_tasks
    computing = [task for task in share.tasks if task in training or task.type == "evaluator"]
    dealt = {task: gpus[(share.first_gpu + i) % len(gpus)] for i, task in enumerate(computing)}
    if len(computing) > len(gpus):
        notes.append(f"{len(computing)} tasks share {_gpus(len(gpus))}, so that their sums do not go through NCCL")
    elif len(computing) < len(gpus) and any(task in training for task in computing):
        all_of_them = "--workers gpu" if has_own_cluster else "--tasks-per-host gpu"
        notes.append(f"{len(computing)} of {_gpus(len(gpus))} used, one per task; {all_of_them} uses all")
    return {task: {"CUDA_VISIBLE_DEVICES": dealt.get(task, "")} for task in share.tasks}


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
