"""``unsilent run``: a script runs as without it, and what it trains is monitored."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from typing import ClassVar

import pytest
import torch

from conftest import command
from unsilent.basics.errors import UsageError
from unsilent.cli.main import run
from unsilent.cli.run import OPTION_CLASSES
from unsilent.cli.scripts import split_at_script
from unsilent.launch import attach
from unsilent.monitor.actions import MonitorStop

LOOP = """
    import sys

    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(losses)
"""


class Fake:
    """Stands for a monitor: what it was made of, and how often there was a backward pass and a step."""

    made: ClassVar[list[Fake]] = []
    error: Exception | None = None
    stops_at = None

    def __init__(self, model, optimizers, **options):
        if self.error is not None:
            raise self.error
        self.names = [name for name, _ in model.named_parameters()]
        self.options, self.optimizers, self.closed = options, len(optimizers), 0
        self.backwards, self.steps = 0, 0
        attach.backward_hooks.add_listener(self)
        self.hooks = [optimizer.register_step_post_hook(self.count) for optimizer in optimizers]
        self.made.append(self)

    def count(self, *_):
        self.steps += 1
        if self.steps == self.stops_at:
            raise MonitorStop("the monitor stopped the job", 16)

    def before_backward(self, tensors, scale):
        self.backwards += 1

    def after_backward(self):
        pass

    def close(self, wait=True):
        self.closed += 1
        attach.backward_hooks.remove_listener(self)
        for hook in self.hooks:
            hook.remove()


@pytest.fixture
def fake(monkeypatch):
    """The class that stands for `Monitor`."""
    cls = type("OneTest", (Fake,), {"made": []})
    monkeypatch.setattr(attach, "Monitor", cls)
    return cls


@pytest.fixture
def script(tmp_path, monkeypatch, capfd):
    """``script(text, *words)``: runs a script in this process; its exit code, what it printed, and errors."""
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    kept = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    plain = torch.autograd.backward, torch.optim.Optimizer.__init__, list(sys.meta_path)

    def start(text, *words, options=()):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        try:
            code = run(["run", *options, *words])
        except SystemExit as end:
            code = end.code
        assert plain == (torch.autograd.backward, torch.optim.Optimizer.__init__, list(sys.meta_path))
        return code, *capfd.readouterr()

    yield start
    for one, handler in zip((signal.SIGTERM, signal.SIGHUP), kept, strict=True):
        signal.signal(one, handler)


def test_a_plain_loop_is_monitored_from_its_first_step(script, fake):
    code, out, err = script(LOOP, "--preset", "asd-v1", "--budget", "1", "train.py")
    (monitor,) = fake.made
    assert (code, err) == (0, "")
    assert out.startswith("[")
    assert (monitor.names, monitor.optimizers) == (["0.weight", "0.bias", "1.weight", "1.bias"], 1)
    assert (monitor.backwards, monitor.steps, monitor.closed) == (4, 4, 1)
    assert (monitor.options["settings"].preset, monitor.options["settings"].budget) == ("asd-v1", 1.0)
    assert monitor.options["compatibility"] is False


def test_a_file_and_variables_are_read(script, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_ASD_ENABLE", "2")
    (tmp_path / "monitor.toml").write_text('on-alarm = "log"\n')
    code, _, err = script(LOOP, "--config", "monitor.toml", "train.py")
    (monitor,) = fake.made
    assert code == 0
    assert err == "unsilent: NPU_ASD_ENABLE asks for on-alarm stop; log was given instead, and is used\n"
    assert (monitor.options["settings"].preset, monitor.options["settings"].on_alarm) == ("asd-v3", "log")
    assert monitor.options["compatibility"] is True


def test_a_variable_that_switches_off_leaves_the_script_alone(script, fake, monkeypatch):
    monkeypatch.setenv("NPU_ASD_ENABLE", "0")
    code, out, err = script(LOOP, "train.py")
    assert (code, fake.made) == (0, [])
    assert out.startswith("[")
    assert err == "unsilent: NPU_ASD_ENABLE=0 switches the detection off; give a preset to monitor the training\n"


FAULTY = LOOP.replace("loss.backward()", "(loss * float('nan') if _ == 2 else loss).backward()")


def test_the_last_line_says_what_was_found(script):
    _, _, err = script(LOOP, "--sampling", "fixed:1", "train.py")
    line = err.splitlines()[-1]
    assert line.startswith(
        "unsilent: no alarm in 4 steps; each tensor was read in every step, 8 series had too few values to be"
    )
    assert line.endswith(" % of the time")
    _, _, err = script(FAULTY, "--events", "e.jsonl", "train.py")
    line = err.splitlines()[-1]
    assert line.startswith("unsilent: 1 alarm in 4 steps; first in step 2: loss number; no step was read; ")
    assert "; see unsilent watch e.jsonl and unsilent incident show " in line


def test_a_script_with_a_monitor_of_its_own_is_left_alone(script):
    begin = "from unsilent.monitor import Monitor\n    own = Monitor(model, optimizer)"
    own = LOOP.replace("losses = []", f"losses = []\n    {begin}")
    assert script(own + "    own.close()\n", "train.py")[::2] == (0, "")


def test_normal_lines_are_printed_unless_the_script_configures_its_log(script, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    lines = script(LOOP, "--log-normal", "--sampling", "fixed:1", "train.py")[2].splitlines()
    assert lines[0].startswith("monitoring rank 0 of 1")
    assert any(line.startswith("step 3: loss ") for line in lines)
    configured = LOOP.replace("import sys", "import logging; logging.basicConfig(format='ours: %(message)s')")
    lines = script(configured, "--log-normal", "train.py")[2]
    assert lines.splitlines()[0].startswith("ours: monitoring rank 0 of 1")
    assert lines.count("monitoring rank") == 1
    assert logging.getLogger("unsilent.monitor").level == logging.NOTSET


def test_arguments_before_the_script_are_explained(script):
    code, _, err = script(LOOP, "--steps", "3", "train.py")
    assert (code, err.count("\n")) == (2, 1)
    assert "No such option: --steps" in err
    assert "; arguments of the script go after the script; see unsilent run --help" in err


SHOWS_ITSELF = """
    import os, pickle, sys

    class Thing: ...

    assert isinstance(pickle.loads(pickle.dumps(Thing())), sys.modules["__main__"].Thing)
    print(__name__, sys.argv, os.path.basename(sys.path[0]), os.path.isabs(__file__), __spec__ is None)
"""


def test_a_script_finds_itself_as_python_would_run_it(script, fake, tmp_path):
    words = ("train.py", "--preset", "x", "-m", "y", "--", "--help")
    code, out, err = script(SHOWS_ITSELF, *words)
    alone = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (code, out) == (0, alone.stdout)
    assert err == (
        "unsilent: no backward pass was seen; nothing was monitored (if the script starts the ranks of a training itself, "
        "start it with torchrun instead)\n"
    )


def test_a_module_runs_with_its_own_arguments(script, fake):
    code, out, _ = script(LOOP + "    print(sys.argv[1:], __spec__.name)", "-m", "train", "--preset", "x", "-h")
    assert (code, len(fake.made)) == (0, 1)
    assert out.endswith("['--preset', 'x', '-h'] train\n")


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("sys.exit()", None), ("sys.exit('no data')", "no data"), ("pass", 0)]
)
def test_exit_codes_are_those_of_the_script(script, fake, end, code):
    assert script(f"{LOOP}\n    {end}", "train.py")[0] == code
    assert fake.made[0].closed == 1


@pytest.mark.parametrize(
    ("begin", "error"),
    [
        ("", "raise ValueError('no data') from KeyError('x')"),
        ("", "1 +"),
        ("", "import nothing_here"),
        pytest.param(LOOP, "loss.backward()", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_raises_shows_its_own_traceback(script, fake, begin, error, tmp_path):
    code, _, err = script(f"{begin}\n    def last():\n        {error}\n    last()", "train.py")
    alone = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert code == alone.returncode == 1
    assert err == alone.stderr


def test_an_argument_parser_of_the_script_works(script, fake):
    text = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.add_argument("--strict", action="store_true")
        print(parser.parse_args())
    """
    assert script(text, "--strict", "train.py", "--lr", "0.5")[1] == "Namespace(lr=0.5, strict=False)\n"
    code, _, err = script(text, "train.py", "--rate", "1")
    assert code == 2
    assert err.splitlines()[-1] == "train.py: error: unrecognized arguments: --rate 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "the script nothing.py does not exist; expected a Python file"),
        (["."], "the script . is a folder"),
        (["-m", "nothing.at_all"], "the module nothing.at_all does not exist"),
        (["-m", "unsilent.monitor"], "the module unsilent.monitor does not exist, or is a package without __main__"),
        ([], "no script was given"),
        (["--preset", "asd-v9", "train.py"], "unknown preset 'asd-v9'; did you mean"),
        (["--rule", "robust-y", "train.py"], "unknown rule 'robust-y'"),
        (["--budget", "5", "train.py"], "--budget is 5; expected a percentage"),
        (["--on-alarm", "skip", "train.py"], "--on-alarm is 'skip', but --mode is 'lagged'"),
        (["--save-to", "states", "train.py"], "--save-to is given, but --on-alarm is 'log'"),
        (["--config", "none.toml", "train.py"], "none.toml"),
        (["--budgte", "5", "train.py"], "No such option: --budgte"),
    ],
)
def test_bad_input_is_one_line(script, fake, words, message):
    code, out, err = script("print('ran')", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_settings_that_do_not_fit_the_model_end_the_script(script, fake):
    fake.error = UsageError("watch is 'x:input', but no module is named 'x'")
    assert script(LOOP, "train.py") == (2, "", "unsilent: error: watch is 'x:input', but no module is named 'x'\n")


def test_an_error_of_the_monitor_does_not_end_the_script(script, fake, caplog):
    clean = script(LOOP, "train.py")[1]
    fake.error = ZeroDivisionError("inside the monitor")
    code, out, _ = script(LOOP, "train.py")
    assert (code, out) == (0, clean)
    (record,) = caplog.records
    assert record.name == "unsilent.monitor"
    assert "inside the monitor" in record.message
    code, _, err = script(LOOP, "--strict", "train.py")
    assert code == 1
    assert err.endswith("ZeroDivisionError: inside the monitor\n")


def test_a_job_that_the_monitor_stops_ends_with_its_code(script, fake):
    fake.stops_at = 2
    assert script(LOOP, "train.py") == (16, "", "unsilent: the monitor stopped the job\n")


def test_an_interrupt_shows_as_in_python(script, fake, monkeypatch):
    registered = []
    monkeypatch.setattr("atexit.register", registered.append)
    code, _, err = script(LOOP + "\n    raise KeyboardInterrupt", "train.py")
    assert (code, err.splitlines()[-1]) == (130, "KeyboardInterrupt")
    assert fake.made[0].closed == 1
    assert registered[0].__self__.is_wanted


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--preset a s.py --x", 3),
        ("--strict s.py --x", 2),
        ("--preset=a --strict -m mod --x", 4),
        ("-mmod -h", 1),
        ("--module=mod -h", 1),
        ("--module mod s.py", 2),
        ("-- -s.py -m", 2),
        ("--preset", 1),
        ("-h", 1),
    ],
)
def test_all_that_follows_the_script_is_its_own(words, count):
    split = words.split()
    assert split_at_script(OPTION_CLASSES, split) == (split[:count], tuple(split[count:]))


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_of_torch_is_imported_before_the_script_does(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nassert not {'torch', 'numpy'} & set(sys.modules)\n")
    done = subprocess.run(command("run", "train.py"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TRAINING = """
import os, sys, torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(3):
    layer(torch.randn(4, 2)).sum().backward()
    optimizer.step()
"""
CLOSINGS = ["sys.stderr.close()", "os.close(2)", "sys.stderr = None", "sys.stdout.close()", "raise SystemExit(3)"]


@pytest.mark.slow
@pytest.mark.parametrize("how", CLOSINGS)
def test_a_script_may_close_its_streams(tmp_path, how):
    """The exit code is the script's, and the last line is on the stderr that it began with."""
    (tmp_path / "train.py").write_text(TRAINING + how)
    done = subprocess.run(command("run", "train.py"), cwd=tmp_path, capture_output=True, text=True, check=False)
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, "no alarm in" in done.stderr) == (plain.returncode, True)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_script_as_they_end_python(tmp_path, ending):
    (tmp_path / "wait.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        command("run", "wait.py"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.send_signal(ending)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -ending
    assert err.endswith("KeyboardInterrupt\n" if ending == signal.SIGINT else "")


RANKS = """
    import atexit
    import os
    import sys

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(40):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        if step == 30 and dist.get_rank() == 1 and "--fault" in sys.argv:
            loss = loss * float("inf")
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} ended with {loss.item():.4f}", flush=True)
    dist.barrier()
    atexit.register(os._exit, 0)  # threads of gloo that are still alive would abort an orderly end
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def started(words, cwd, **environment):
    """A process that has ended."""
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, **ONE_THREAD, **environment}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_ranks_of_torchrun_are_monitored_together(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    alone = started([*TORCHRUN, "train.py"], tmp_path)
    words = [*TORCHRUN, "-m", "unsilent", "run", "--sampling", "fixed:1", "--events", "e.jsonl", "train.py"]
    clean = started(words, tmp_path)
    assert clean.returncode == 0, clean.stderr
    ended = re.compile(r"rank \d ended with [\d.]+")
    assert sorted(ended.findall(clean.stdout)) == sorted(ended.findall(alone.stdout))
    assert len(ended.findall(clean.stdout)) == 2
    for rank in (0, 1):
        kinds = [event["kind"] for event in events(tmp_path / f"e.rank{rank}.jsonl")]
        assert (kinds[0], kinds[-1], {"alarm", "verdict"} & set(kinds)) == ("started", "ended", set())
    faulty = started([*words, "--fault"], tmp_path, NPU_ASD_ENABLE="2")
    assert faulty.returncode != 0
    assert faulty.stdout == ""  # both ranks were stopped
    assert faulty.stderr.count("unsilent: the monitor stopped the job") == 2
    assert "accuracy sensitivity feature abnormal" in faulty.stderr
    for rank in (0, 1):
        (verdict,) = [event for event in events(tmp_path / f"e.rank{rank}.jsonl") if event["kind"] == "verdict"]
        assert (verdict["suspect"], verdict["action"], verdict["step"]) == (1, "stop", 30)


@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import torch
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
            model, optimizer, data = accelerator.prepare(model, optimizer, data)
            for batch in data:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            print("trained")
        """)
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    done = started([*launch, "-m", "unsilent", "run", "--events", "e.jsonl", "train.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert events(tmp_path / "e.jsonl")[-1]["steps"] == 4


TRAINER = """
    import sys

    import torch
    import transformers

    class Fault(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **given):
            if state.global_step == 20:
                next(iter(model.parameters())).grad.view(-1)[3] = float("nan")

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )
    rows = [{"input_ids": (ids := torch.randint(64, (12,))), "labels": ids} for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, max_steps=30, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )
    model = transformers.LlamaForCausalLM(config)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[Fault()] if "--fault" in sys.argv else []
    )
    trainer.train()
    print("weights", [p.detach().double().sum().item() for p in model.parameters()])
"""


@pytest.mark.slow
def test_a_script_with_a_trainer_of_transformers_runs_unchanged(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINER))
    alone = started([sys.executable, "train.py"], tmp_path)
    run_monitored = [sys.executable, "-m", "unsilent", "run", "--events", "e.jsonl", "--sampling", "fixed:1"]
    clean = started([*run_monitored, "train.py"], tmp_path)
    assert clean.returncode == 0, clean.stderr
    assert clean.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1]
    (first, *_, last) = events(tmp_path / "e.jsonl")
    assert first["series"]["norm-input-gradient"] > 0
    assert (last["steps"], last["alarms"]) == (30, 0)
    faulty = started([*run_monitored, "--on-alarm", "stop", "train.py", "--fault"], tmp_path)
    assert faulty.returncode in (16, 17)
    assert faulty.stderr.splitlines()[-1].startswith("unsilent: the monitor stopped the job")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--metrics-port", "0")])
def test_a_child_that_the_script_forks_is_not_monitored(tmp_path, options):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(LOOP)
        + textwrap.dedent("""
            import os

            child = os.fork()
            if not child:
                optimizer.zero_grad()
                model(torch.randn(5, 4)).square().mean().backward()
                optimizer.step()
                sys.exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        """)
    )
    done = started(command("run", *options, "--events", "events.jsonl", "train.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = events(tmp_path / "events.jsonl")
    assert [one["kind"] for one in found if one["kind"] in ("started", "ended")] == ["started", "ended"]
    assert found[-1]["steps"] == 4


@pytest.mark.slow
def test_ranks_that_make_other_numbers_of_steps_end_in_order(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            model = torch.nn.Linear(8, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(20 + 3 * dist.get_rank()):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
            dist.destroy_process_group()
        """)
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "unsilent"]
    done = started([*words, "run", "--events", "events.jsonl", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    for path in tmp_path.glob("events*.jsonl"):
        kinds = [one["kind"] for one in events(path)]
        assert (kinds[-1], "monitor-failed" in kinds, "verdict" in kinds) == ("ended", False, False)
    assert len(list(tmp_path.glob("events*.jsonl"))) == 2


# -- isolated jobs and commands on an alarm ------------------------------------------------------------------------------


def isolated(*words):
    """The words of a command that lacks nothing."""
    return "run", "--isolate", "--nproc", "2", "--checkpoints", "c", "--events", "e.jsonl", "--on-alarm", "stop", *words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--nproc", "2", "train.py"), "without --isolate, nothing reads them: leave out --nproc"),
        (("run", "--isolate", "train.py"), "--isolate needs --nproc; give it, like --nproc 4"),
        (("run", "--isolate", "--nproc", "2", "train.py"), "--isolate needs --checkpoints; give it"),
        (("run", "--isolate", "--nproc", "2", "--checkpoints", "c", "train.py"), "--isolate needs --events; give it"),
        (isolated("--nproc", "0", "train.py"), "--nproc is 0; expected 1 or more"),
        (isolated("--spare", "-1", "train.py"), "--spare is -1; expected 0 or more"),
        (isolated("--restarts", "-1", "train.py"), "--restarts is -1; expected 0 or more"),
        (isolated("--selftest-minutes", "-1", "train.py"), "--selftest-minutes is -1; expected 0 or more"),
        (isolated("--on-alarm", "log", "train.py"), "--on-alarm is 'log', which stops no job"),
        (isolated("--incident", "off", "train.py"), "--incident is 'off', but --isolate reads what it records"),
        (isolated("--rule", "nothing", "train.py"), "nothing"),
        (isolated("other.py"), "the script other.py does not exist"),
        (isolated(), "no script was given"),
    ],
)
def test_an_isolated_job_that_lacks_something_is_refused_in_one_line(words, said, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert run([*words]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert said in err


def test_ranks_of_an_isolated_job_get_the_options_of_the_monitor_and_the_arguments(tmp_path, monkeypatch):
    from unsilent.launch import isolation

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "m.toml").write_text('preset = "megatron"\n')
    jobs = []
    monkeypatch.setattr(isolation.Isolation, "run", lambda self: jobs.append(self._job) or 0)
    more = ("--rule", "nonfinite", "--on-alarm-exec", "mail 'a b'", "--config", "m.toml")
    assert run([*isolated(*more, "train.py", "--nproc", "7", "-m")]) == 0
    (job,) = jobs
    assert job.ranks == 2
    assert {*job.words} >= {"--preset", "megatron", "--rule", "nonfinite", "mail 'a b'", "stop", "e.jsonl"}
    assert job.words[0] == "run"
    assert job.words[-5:] == ("--", "train.py", "--nproc", "7", "-m")
    own, script = split_at_script(OPTION_CLASSES, job.words[1:])
    assert (own[-2:], script) == (["--", "train.py"], ("--nproc", "7", "-m"))


def test_a_command_gets_the_verdict_and_is_waited_for(script, tmp_path, caplog):
    code, _, _ = script(
        FAULTY, "--sampling", "fixed:1", "--on-alarm-exec", "sleep 0.5; cat > got.json; exit 3", "train.py"
    )
    assert code == 0
    verdict = json.loads((tmp_path / "got.json").read_text())
    assert (verdict["kind"], verdict["step"], verdict["rank"], verdict["exit_code"]) == ("undetermined", 2, 0, 0)
    assert caplog.records[-1].getMessage() == "--on-alarm-exec: exit code 3; the job goes on"


@pytest.mark.slow
def test_torchrun_ends_no_rank_before_rank_0_has_run_its_command(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    words = [*TORCHRUN, "-m", "unsilent", "run", "--sampling", "fixed:1", "--events", "e.jsonl", "--on-alarm", "stop"]
    done = started([*words, "--on-alarm-exec", "sleep 3; cat > got.json", "train.py", "--fault"], tmp_path)
    assert done.returncode != 0
    assert json.loads((tmp_path / "got.json").read_text())["rank"] == 1
