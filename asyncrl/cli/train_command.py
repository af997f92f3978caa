"""``asyncrl train``: train a policy asynchronously. ``--help`` explains the options.

Ctrl-C or SIGTERM stops the run: the run writes its policy, and ends its processes. A second signal kills all processes
at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from asyncrl.checks import check_options, resolve_devices
from asyncrl.cli.compose import compose_run, dump_yaml, help_text
from asyncrl.cli.preflight import check_folders, dry_run, preflight
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.cli.supervisor import (
    EXIT_FAILED,
    Ending,
    Stopping,
    exit_at_once,
    give_up_after,
    report_fault,
    supervise,
)
from asyncrl.config import RunConfig, override_of
from asyncrl.core.errors import AsyncRLError, ClusterDiedError, root_cause, with_exit_status
from asyncrl.core.host import forget_process_group, gpu_memory_bytes, visible_gpus
from asyncrl.core.remote import last_lines
from asyncrl.metrics import TerminalView, read_life
from asyncrl.planner.fit import with_recomputation
from asyncrl.run import protect_own_cluster
from asyncrl.run.resume import check_beginning
from asyncrl.run.run_folder import (
    RunPaths,
    has_begun_training,
    hold_shared_folder,
    make_run_dir,
    shared_folder,
    sweep_shared_memory,
)
from asyncrl.run.run_lives import end_life
from asyncrl.sft.warm_start import WarmStart, warm_start
from learner.checkpoint_folder import newest_checkpoint
from learner.config import Device

EXIT_USAGE = 2
_MULTIRUN = {"--multirun", "-m"}
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_said_last = threading.Lock()


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl train`` and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    flags = {argument for argument in arguments if argument.startswith("-")}
    overrides = [argument for argument in arguments if argument not in flags]
    unknown = flags - {"-h", "--help", "--help-all", "--print-config", *_MULTIRUN}
    if unknown:
        raise ValueError(f"unknown flag {sorted(unknown)[0]}, expected OPTION=VALUE; --help lists the options")
    if flags & _MULTIRUN and not flags - _MULTIRUN:
        from asyncrl.cli.multirun import multirun  # import here, because the module loads Hydra's plugins

        return multirun(overrides)
    config = compose_run(overrides)
    check_options(config)
    check_beginning(config)
    if not flags and not config.dry_run:
        check_folders(config)
    if flags:
        shown = dump_yaml(config) if "--print-config" in flags else help_text(config, everything="--help-all" in flags)
        sys.stdout.write(shown + "\n")
        return 0
    if not config.dry_run:
        return _train(config, overrides)
    found = dry_run(config)
    sys.stdout.write(found.page)
    return EXIT_USAGE if found.problems else 0


def _train(config: RunConfig, overrides: Sequence[str]) -> int:
    try:
        run_dir = make_run_dir(config, dump_yaml(config))
        hold_shared_folder(run_dir)  # the folder stays locked until this process and its child have ended
    except OSError as error:
        sys.stderr.write(f"error: {_with_remedy(error)}\n")
        return EXIT_FAILED
    stop_timeout_s = config.save_timeout_s + config.stop_timeout_s
    ending = supervise(lambda: _run_to_the_end(config, run_dir, overrides), stop_timeout_s=stop_timeout_s)
    shutil.rmtree(shared_folder(run_dir), ignore_errors=True)
    status = ending.status if ending.own else EXIT_FAILED
    try:
        end_life(run_dir, status)
    except OSError as error:
        why = f"{error.strerror}; asyncrl runs lists the run as killed"
        sys.stderr.write(f"warning: the end of the run cannot be written to {run_dir / 'life.json'}: {why}\n")
    if not ending.own:
        sys.stderr.write(_why_it_ended(ending, config, run_dir, overrides))
    return status


def _why_it_ended(ending: Ending, config: RunConfig, run_dir: Path, overrides: Sequence[str]) -> str:
    if ending.fault:
        return f"{ending.fault} (the controller ended before it had stopped all processes; the others were killed)\n"
    if ending.late:
        what = (
            f"the controller did not stop within save_timeout_s={config.save_timeout_s:g} and stop_timeout_s="
            f"{config.stop_timeout_s:g} s after the signal and was killed; raise them, or find the cause in its log"
        )
    elif ending.status < 0:
        what = f"the controller died of {signal.Signals(-ending.status).name}: it was killed, or memory ran out"
    else:
        what = (
            f"a library ended the controller with status {ending.status}: Ray does this when one of its daemons "
            "(gcs_server, raylet) dies"
        )
    log = run_dir / "logs" / "controller.log"
    ends = [f"logs: {log.parent}", how_to_continue(config, run_dir, overrides), f"error: {what}"]
    return f"error: {what}; the end of {log}:\n{last_lines(str(log))}\n\n" + "\n".join(filter(None, ends)) + "\n"


def _run_to_the_end(config: RunConfig, run_dir: Path, overrides: Sequence[str]) -> int:
    _log_to(run_dir / "logs" / "controller.log")
    view = TerminalView(title=f"asyncrl {config.experiment}", total_steps=config.total_steps)
    with view:
        view.say(f"writing to {run_dir}")
        for folder in sweep_shared_memory():
            view.say(f"removed {folder} of an earlier run whose processes were all killed")
        status, message = asyncio.run(_until_done_or_stopped(config, run_dir, overrides, view))
    with suppress(OSError):  # ignore write errors: the program that reads the output may have closed the pipe
        sys.stdout.flush()
    if message:
        _say_last(message)
    return status


async def _until_done_or_stopped(
    config: RunConfig, run_dir: Path, overrides: Sequence[str], view: TerminalView
) -> tuple[int, str]:
    timeout_s = config.stop_timeout_s
    too_long = f"stopping took longer than stop_timeout_s={timeout_s:g} s; the remaining processes were killed"

    def last_words_of(fault: BaseException) -> str:
        return last_words(fault, run_dir, how_to_continue(config, run_dir, overrides))

    def on_fault(fault: BaseException) -> None:
        # If the run was cancelled, set no deadline for its stop here: `Stopping` has already set this deadline.
        if not isinstance(fault, asyncio.CancelledError):
            last_words = last_words_of(fault)
            report_fault(last_words)
            # If Ray's control service dies, Ray ends this process some seconds later, so exit now with the message.
            if isinstance(fault, ClusterDiedError):
                _give_up(last_words, run_dir, EXIT_FAILED)
            give_up_after(timeout_s, lambda: _give_up(f"{last_words} ({too_long})", run_dir, EXIT_FAILED))

    def results(note: str = "") -> str:
        names = ("policy", "summary.json", "reward.png", "checkpoints", "logs")
        found = [name for name in names if (run_dir / name).exists()]
        written = f"{', '.join(found)} in {run_dir}" if found else "nothing was started"
        return "; ".join(filter(None, (written + note, how_to_continue(config, run_dir, overrides))))

    def give_up() -> None:
        _give_up(f"stopped by {stopping.cause}; {results(f' ({too_long})')}", run_dir, stopping.status)

    def time_to_stop_s() -> float:
        return timeout_s + config.save_timeout_s * has_begun_training(run_dir)

    task = asyncio.ensure_future(_run(config, run_dir, overrides, view, on_fault))
    stopping = Stopping(task, view.say, timeout_s=time_to_stop_s, give_up=give_up)
    stopping.listen(asyncio.get_running_loop())
    try:
        await task
    except asyncio.CancelledError:
        return stopping.status, f"stopped by {stopping.cause}; {results()}"
    except Exception as error:
        logging.getLogger(__name__).error("the run failed", exc_info=error)
        return EXIT_FAILED, last_words_of(error)
    finally:
        stopping.close()
    return 0, ""


def how_to_continue(config: RunConfig, run_dir: Path, overrides: Sequence[str]) -> str:
    """Return a line with the command that continues a run from a checkpoint; an empty text if there is no checkpoint.

    The command names the newest complete checkpoint of the run. If the run has saved no complete checkpoint, the
    command names the checkpoint from which the run itself was resumed. If the search for a checkpoint fails, the result
    is empty too. ``overrides`` are the options of the run's command line.
    """
    try:
        checkpoint = newest_checkpoint(RunPaths.checkpoints_of(config, run_dir))
        life = read_life(run_dir)
    except (OSError, ValueError) as error:
        # Log this error only as a warning. If it were raised, it would hide the error that ended the run.
        logging.getLogger(__name__).warning("no checkpoint to continue: %s", error)
        return ""
    if checkpoint is None and life is not None and life.resumed:
        checkpoint = Path(life.resumed)
    if checkpoint is None:
        return ""
    own = ("checkpoint.resume=", "run_dir=")
    command = ["asyncrl", "train", *(option for option in overrides if not option.startswith(own))]
    return f"to continue: {shlex.join([*command, override_of('checkpoint.resume', checkpoint)])}"


def last_words(error: BaseException, run_dir: Path, continuing: str = "") -> str:
    """Return the message that ends the output of a failed run.

    The message has the whole text of the error, the folder of the logs, and ``continuing`` (the command that continues
    the run). Its last line repeats the first line of the error's text. If that first line ends with a colon, the last
    line of the error's text follows after the colon.
    """
    cause = root_cause(error)
    if isinstance(cause, OSError) and cause.errno in _FULL:
        cause = ValueError(_with_remedy(cause, run_dir))
    kind = "" if isinstance(cause, AsyncRLError | ValueError) else f"{type(cause).__name__}: "
    first, _, rest = str(cause).strip().partition("\n")
    if first.endswith(":") and rest:
        first += f" … {rest.splitlines()[-1]}"
    headline = f"error: {kind}{first}"
    if not run_dir.exists():  # the run failed before it started a process, so there are no logs
        return headline if not rest else f"{kind}{cause}\n{headline}"
    return "\n".join(filter(None, [f"{kind}{cause}\n\nlogs: {run_dir / 'logs'}", continuing, headline]))


def _with_remedy(error: OSError, run_dir: Path | None = None) -> str:
    if error.errno is None:
        return str(error)
    where = error.filename or run_dir or "the run's folder"
    what = f"{where} cannot be written: {error.strerror}"
    if error.errno in _FULL:
        return f"{what}; free space on its disk, or choose a folder on another disk with output_dir=DIR"
    return f"{what}; change its permissions, or choose another folder with output_dir=DIR"


def _say_last(words: str) -> None:
    """Write ``words``, the message about the end of the run, to stderr. Only the first call writes its message.

    The main thread and the thread of `give_up_after` may call this function at the same time.
    """
    if _said_last.acquire(blocking=False):
        with suppress(OSError):  # ignore write errors: the program that reads the output may have closed the pipe
            sys.stderr.write(words + "\n")
            sys.stderr.flush()


def _give_up(last_words: str, run_dir: Path, status: int) -> None:
    _say_last(last_words)
    shutil.rmtree(shared_folder(run_dir), ignore_errors=True)
    exit_at_once(status)


async def _run(
    config: RunConfig,
    run_dir: Path,
    overrides: Sequence[str],
    view: TerminalView,
    on_fault: Callable[[BaseException], None],
) -> None:
    if foreign := forget_process_group():
        view.say(
            f"the variables {', '.join(foreign)} are ignored: the run describes the groups of its processes itself"
        )
    async with AsyncExitStack() as stack:
        try:
            config = await asyncio.to_thread(with_quickstart_assets, config)
            if not config.ray.address:  # the devices of an existing Ray cluster are not known yet
                config = resolve_devices(config, await asyncio.to_thread(visible_gpus), view.say)
                config = with_recomputation(config, await asyncio.to_thread(gpu_memory_bytes))
            with view.waiting_for("preflight"):
                prompts = await preflight(config, view.say)
        except (ValueError, asyncio.CancelledError):
            shutil.rmtree(run_dir, ignore_errors=True)  # remove the folder: no process was started, so it has no logs
            raise
        if not config.ray.address:
            protect_own_cluster()
        log_path = run_dir / "logs" / "sft.log"
        warming = WarmStart(partial(warm_start, overrides=overrides, log_path=log_path, say=view.say))
        stack.push_async_callback(warming.stop)
        if config.learner.device is Device.cpu:
            warming.begin(config)
        with view.waiting_for("Ray to be imported"):
            module = await asyncio.to_thread(import_module, "asyncrl.run.run")
        await module.Run(config, run_dir, prompts, warming, view, on_fault).run()


class _LogFile(logging.FileHandler):
    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        del record
        if not self._failed:
            self._failed = True
            warning = f"warning: the controller cannot write {self.baseFilename}: {sys.exc_info()[1]}\n"
            with suppress(OSError):  # ignore the error if standard error is not writable
                sys.stderr.write(warning)


def _log_to(path: Path) -> None:
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
