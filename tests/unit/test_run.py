"""The command line of the launcher."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from tfdist import run
from tfdist.errors import LaunchError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a script, a package, and a folder that is no program."""
    (tmp_path / "train.py").touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["train.py"], {"command": ("train.py",), "workers": 1, "ps": 0, "chief": False}),
        (["--workers", "2", "train.py"], {"workers": 2}),
        (["--workers=2", "train.py"], {"workers": 2}),
        (["--tasks-per-host", "2", "train.py"], {"workers": 2, "share": None}),
        (["--nproc-per-node", "2", "train.py"], {"workers": 2}),
        (["--nproc_per_node=2", "train.py"], {"workers": 2}),
        (["--workers", "2", "--ps", "1", "train.py"], {"workers": 2, "ps": 1, "task_count": 4}),
        (["--workers", "2", "--chief", "train.py"], {"task_count": 3}),
        (["--workers", "2", "--evaluator", "train.py"], {"evaluator": True, "task_count": 3, "port_count": 2}),
        (["-m", "pack.train", "-x"], {"command": ("-m", "pack.train", "-x"), "name": "pack.train"}),
        (["--module", "pack"], {"command": ("-m", "pack")}),
        (["program"], {"command": ("program",)}),
        # After the script everything is the script's.
        (["train.py", "--workers", "5", "-m"], {"command": ("train.py", "--workers", "5", "-m"), "workers": 1}),
        (["train.py", "--", "--x"], {"command": ("train.py", "--", "--x")}),
        (["--workers", "2", "--", "train.py", "--help"], {"command": ("train.py", "--help")}),
        (["--log_dir", "a b", "train.py"], {"log_dir": "a b"}),
        (["--start-timeout", "1.5", "--step-timeout=2", "train.py"], {"start_timeout_s": 1.5, "step_timeout_s": 2.0}),
        (["--shutdown_timeout", "9", "train.py"], {"shutdown_timeout_s": 9.0}),
        (["--max-restarts", "3", "train.py"], {"max_restarts": 3}),
        (["train.py"], {"max_restarts": 0}),
        (["--raw", "--no-pty", "--threads-per-task", "3", "train.py"], {"raw": True, "pty": False}),
    ],
)
def test_a_command_line_is_read(folder, argv, expected):
    options = run.read_command_line(argv, {"CUDA_VISIBLE_DEVICES": ""})
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("environ", "argv", "expected"),
    [
        ({"TFDIST_RUN_WORKERS": "3"}, ["train.py"], {"workers": 3}),
        ({"TFDIST_RUN_WORKERS": "3"}, ["--workers", "2", "train.py"], {"workers": 2}),
        ({"TFDIST_RUN_RAW": "1", "TFDIST_RUN_CHIEF": "false"}, ["train.py"], {"raw": True, "chief": False}),
        ({"TFDIST_RUN_LOG_DIR": "logs", "TFDIST_RUN_DIR": "/outer"}, ["train.py"], {"log_dir": "logs"}),
        ({"TFDIST_RUN_MAX_RESTARTS": "2"}, ["train.py"], {"max_restarts": 2}),
        ({"TFDIST_RUN_START_TIMEOUT": "7"}, ["train.py"], {"start_timeout_s": 7.0}),
        ({"TFDIST_RUN_WORKERS": ""}, ["train.py"], {"workers": 1}),
        ({"TFDIST_RUN_TASKS_PER_HOST": "3"}, ["train.py"], {"workers": 3}),
        ({"TFDIST_RUN_TASKS_PER_HOST": "3"}, ["--workers", "2", "train.py"], {"workers": 2}),
        ({"TFDIST_RUN_WORKERS": "3"}, ["--tasks-per-host", "2", "train.py"], {"workers": 2}),
    ],
)
def test_the_environment_gives_what_the_command_line_leaves_out(folder, environ, argv, expected):
    options = run.read_command_line(argv, {"CUDA_VISIBLE_DEVICES": "", **environ})
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("gpus", "argv", "expected"),
    [
        ("", [], {"workers": 1}),
        ("0", [], {"workers": 1}),
        ("0,1,2", [], {"workers": 3}),
        ("0,1,2", ["--workers", "gpu"], {"workers": 3}),
        ("0,1,2", ["--nproc-per-node=auto"], {"workers": 3}),
        ("", ["--workers", "auto"], {"workers": 1}),
        ("0,1,2", ["--workers", "2"], {"workers": 2}),
        # A chief that trains has a GPU as well, one that coordinates has none.
        ("0,1,2", ["--chief"], {"workers": 2, "task_count": 3}),
        ("0", ["--chief"], {"workers": 1, "task_count": 2}),
        ("0,1", ["--ps", "1", "--workers", "gpu"], {"workers": 2, "task_count": 4}),
        ("0,1,2", ["--evaluator"], {"workers": 2, "task_count": 3}),
        ("0,1,2", ["--chief", "--evaluator"], {"workers": 1, "task_count": 3}),
    ],
)
def test_a_host_with_gpus_runs_a_worker_for_each(folder, gpus, argv, expected):
    options = run.read_command_line([*argv, "train.py"], {"CUDA_VISIBLE_DEVICES": gpus})
    assert {name: getattr(options, name) for name in expected} == expected


def host_config(*hosts, index=0):
    return json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})


@pytest.mark.parametrize(
    ("gpus", "argv", "tasks"),
    [
        ("0,1", [], ["worker 2", "worker 3"]),
        ("0,1", ["--tasks-per-host", "1"], ["worker 1"]),
        ("0,1", ["--nproc-per-node", "3"], ["worker 3", "worker 4", "worker 5"]),
        ("0,1", ["--tasks-per-host", "gpu"], ["worker 2", "worker 3"]),
        ("", [], ["worker 1"]),
        ("", ["--tasks-per-host", "auto"], ["worker 1"]),
        ("", ["--tasks-per-host", "2"], ["worker 2", "worker 3"]),
    ],
)
def test_a_host_with_an_entry_in_tf_config_runs_its_share(folder, gpus, argv, tasks):
    environ = {"TF_CONFIG": host_config("a:2222", "b:2222", index=1), "CUDA_VISIBLE_DEVICES": gpus}
    options = run.read_command_line([*argv, "train.py"], environ)
    assert [str(task) for task in options.tasks] == tasks


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--workers", "2"], {"TF_CONFIG": host_config("a:2222")}),  # a cluster of one task is nobody else's
        (["--workers", "2"], {"TF_CONFIG": "{"}),  # which the tasks will not see
        (["--workers", "2"], {"TF_CONFIG": "{}"}),
        (["--workers", "2"], {"TF_CONFIG": host_config("a:1", "b:1"), "TFDIST_RUN_DIR": "/outer"}),
        (["--tasks-per-host", "2"], {"TF_CONFIG": host_config("a:1", "b:1"), "TFDIST_RUN_DIR": "/outer"}),
    ],
)
def test_a_cluster_of_this_host_alone_is_started_where_tf_config_names_no_other_host(folder, argv, environ):
    options = run.read_command_line([*argv, "train.py"], environ)
    assert (options.workers, options.share) == (2, None)


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ([], {}, "which script?"),
        (["--workers", "2"], {}, "which script?"),
        (["--workers", "2", "--"], {}, "which script?"),
        (["--workers"], {}, "expected one argument"),
        (["nothing.py"], {}, "the script 'nothing.py' is not in"),
        (["pack.train"], {}, "for a module: -m pack.train"),
        (["data"], {}, "'data' is a folder without a __main__.py"),
        (["-m", "train.py"], {}, "leave out -m, or write -m train"),
        (["-m", "no_such_package"], {}, "there is no module 'no_such_package'"),
        (["--workers", "0", "train.py"], {}, "--workers must be at least 1, not 0"),
        (["--tasks-per-host", "0", "train.py"], {}, "--tasks-per-host must be at least 1, not 0"),
        (["--workers", "2", "--tasks-per-host", "3", "train.py"], {}, "both say how many tasks run here"),
        (["--workers", "gpu", "train.py"], {"CUDA_VISIBLE_DEVICES": ""}, "--workers gpu: there is no GPU in CUDA_VIS"),
        (["--tasks-per-host", "gpu", "train.py"], {"CUDA_VISIBLE_DEVICES": "-1"}, "--tasks-per-host gpu: there is no"),
        (
            ["--chief", "--workers", "gpu", "train.py"],
            {"CUDA_VISIBLE_DEVICES": "7"},
            "there is 1 GPU, which the chief takes, in CUDA_VISIBLE_DEVICES",
        ),
        (
            ["--chief", "--evaluator", "--workers", "gpu", "train.py"],
            {"CUDA_VISIBLE_DEVICES": "6,7"},
            "there are 2 GPUs, which the chief and the evaluator take, in CUDA_VISIBLE_DEVICES",
        ),
        (["train.py"], {"CUDA_VISIBLE_DEVICES": "1,1"}, "names the GPU 1 twice"),
        (["train.py"], {"TF_CONFIG": "{"}, "TF_CONFIG: the text is not JSON"),
        (["train.py"], {"TF_CONFIG": host_config("a:1", "a:1")}, "TF_CONFIG: worker 0 and worker 1 have the same"),
        (
            ["--tasks-per-host=2", "train.py"],
            {"TF_CONFIG": host_config("a:1", "a:2")},
            "worker 0 at a:1 is split into 2 tasks at ports 1 to 2, and worker 1 is at a:2",
        ),
        *(
            (
                [*own, "train.py"],
                {"TF_CONFIG": host_config("a:1", "b:1")},
                f"{own[0]} asks for another one on this host",
            )
            for own in (["--workers", "2"], ["--chief"], ["--ps", "1"], ["--evaluator"])
        ),
        (["--workers", "two", "train.py"], {}, "'two' is not a whole number"),
        (["--ps", "1", "train.py"], {}, "--ps 1 needs workers: add --workers N"),
        (["--workers", "1", "--ps", "-1", "train.py"], {}, "--ps"),
        (["--wrokers", "2", "train.py"], {}, "there is no flag --wrokers (did you mean --workers?)"),
        (["--log-dri=x", "train.py"], {}, "did you mean --log-dir?"),
        (["--start_timout", "3", "train.py"], {}, "did you mean --start-timeout?"),
        (["-x", "train.py"], {}, "there is no flag -x"),
        (["--work", "2", "train.py"], {}, "there is no flag --work"),
        (["--raw=yes", "train.py"], {}, "--raw"),
        (["--start-timeout", "-1", "train.py"], {}, "--start-timeout"),
        (["--start-timeout", "soon", "train.py"], {}, "'soon' is not a number of seconds"),
        (["train.py"], {"TFDIST_RUN_WORKERS": "many"}, "TFDIST_RUN_WORKERS: 'many' is not a whole number"),
        (["train.py"], {"TFDIST_RUN_RAW": "maybe"}, "TFDIST_RUN_RAW must be 1 or 0, not 'maybe'"),
    ],
)
def test_bad_use_is_told_in_one_sentence(folder, argv, environ, words):
    with pytest.raises(LaunchError) as caught:
        run.read_command_line(argv, environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_use_ends_with_2_and_starts_nothing(capsys, folder):
    assert run.main(["--workers", "0", "train.py"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "tfdist: --workers must be at least 1, not 0\n"


def test_help_is_quick_and_names_every_flag():
    def processor_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times = []
    for _ in range(3):
        start = processor_s()  # time on the clock is also that of whatever else runs here
        text = subprocess.run(
            [sys.executable, "-m", "tfdist.run", "--help"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        times.append(processor_s() - start)
    assert min(times) < 0.5
    for flag in ("--workers", "--chief", "--ps", "--module", "--log-dir", "--raw", "--start-timeout", "--version"):
        assert flag in text
    assert "_" not in text.replace("TF_CONFIG", "")  # one spelling each


def test_the_launcher_loads_neither_numpy_nor_tensorflow():
    code = (
        "import sys, tfdist, tfdist.run, tfdist.launch.launcher, tfdist.process\n"
        "print([name for name in ('numpy', 'tensorflow', 'keras') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert ended.stdout == "[]\n"


def test_the_docstring_is_the_manual():
    for word in (
        "Usage by case",
        "Definitions",
        "Failure modes",
        "Exit codes",
        "TFDIST_RUN_WORKERS",
        *map(str, (42, 75, 143)),
    ):
        assert word in (run.__doc__ or "")
