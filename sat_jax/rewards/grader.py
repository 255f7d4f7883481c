"""Runs a reward function over many responses without letting any of them hold up, break or outlive the run.

Every worker is a separate process (fresh, warm, killable) with a thread of this process that feeds it and watches the
clock. A grading's clock starts when its worker starts on it, so jobs that wait behind a slow one lose nothing; there
are no signals, so it works from any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from sat_jax.rewards.functions import Grade, GradeJob, adapt_reward, load_reward, run_reward

if TYPE_CHECKING:  # the nouns import jax, which worker processes must not pay for
    from sat_jax.types import Group

_MOST_AT_ONCE = 16
"""Jobs sent to a worker in one message: a round trip costs more than most gradings."""

_Entry = tuple[bytes, Future[Grade]]
"""A pickled job and where its grade goes."""

_START_LIMIT_S = 120.0
_IDLE_DEATHS = 3


class Grader:
    """Grades responses with one reward function.

    Args:
        reward: ``module:function``; with ``workers=0`` the function itself will do.
        workers: processes; 0 grades in the caller's thread without any protection: for cheap, trusted functions only.
        timeout_s: seconds that one grading may take before its worker is killed and the grade is a ``timeout``.
        memory_mb: address space of a worker in MiB, or 0 for no limit; a grading that exceeds it fails.
    """

    def __init__(
        self, reward: str | Callable[..., Any], *, workers: int = 2, timeout_s: float = 10.0, memory_mb: int = 4096
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers = {workers}: use 0 to grade in this process, or at least 1")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s = {timeout_s}: a grading needs a positive time limit in seconds")
        self.counts: Counter[str] = Counter()  # grades of each verdict
        self.restarts = 0  # workers that had to be replaced
        self._timeout_s = timeout_s
        self._pending: deque[_Entry] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._function = None
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        if workers == 0:
            self._function = load_reward(reward) if isinstance(reward, str) else adapt_reward(reward)
            return
        if not isinstance(reward, str):
            raise ValueError(f"reward {reward!r}: workers import it by name; give module:function, or workers=0")
        try:
            for _ in range(workers):
                self._workers.append(_Worker(reward, timeout_s, memory_mb))
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self._kill_workers()
            raise
        for index in range(workers):
            thread = threading.Thread(target=self._feed, args=(index,), name=f"grader-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, job: GradeJob) -> Future[Grade]:
        """Grade one response in the background (at once with ``workers=0``).

        An exception of the reward function is a grade of verdict ``error``, never an exception of the future. A job
        whose metadata cannot be pickled is a ``ValueError``.
        """
        future: Future[Grade] = Future()
        payload = b"" if self._function is not None else _pickled(job)
        with self._change:
            if self._closed:
                raise ValueError("this grader is closed: make a new one")
            if self._function is None:
                self._pending.append((payload, future))
                self._change.notify()
                return future
        self._finish(future, run_reward(self._function, job))
        return future

    def grade(self, jobs: Sequence[GradeJob]) -> list[Grade]:
        """Grade many responses and wait for all; grades come back in the order of the jobs."""
        return [future.result() for future in [self.submit(job) for job in jobs]]

    def grade_groups(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with ``reward`` and ``reward_info`` (with the ``verdict``) of every trajectory filled in."""
        asked = [(group.prompt, t) for group in groups for t in group.trajectories]
        grades = self.grade([GradeJob(p.text, t.text, p.answer, p.source, p.metadata) for p, t in asked])
        graded = (
            dataclasses.replace(t, reward=grade.reward, reward_info={**grade.info, "verdict": grade.verdict})
            for (_, t), grade in zip(asked, grades, strict=True)
        )
        return [dataclasses.replace(g, trajectories=tuple(next(graded) for _ in g.trajectories)) for g in groups]

    def close(self) -> None:
        """Kill the workers; what was not graded is cancelled. Closing twice does nothing."""
        for future in self._no_more():
            future.cancel()
        self._kill_workers()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _finish(self, future: Future[Grade], grade: Grade) -> None:
        if grade.failed:
            grade = dataclasses.replace(grade, reward=0.0)
        with self._change:
            self.counts[grade.verdict] += 1
        with contextlib.suppress(InvalidStateError):  # its owner cancelled it meanwhile
            future.set_result(grade)

    def _feed(self, index: int) -> None:
        """The thread of one worker: take jobs, hand them over, watch the clock, replace the worker where it must be."""
        idle_deaths = 0
        while entries := self._take():
            worker = self._workers[index]
            try:
                worker.send([job for job, _ in entries])
            except OSError:  # it died between two jobs, so none of these is to blame
                idle_deaths += 1
                done, reason = 0, "died while idle"
            else:
                idle_deaths = 0
                done, reason = self._collect(worker, entries)
            if done == len(entries) and not reason:
                continue
            with self._change:
                if self._closed:
                    for _, future in entries[done:]:
                        future.cancel()
                    return
                self._pending.extendleft(reversed(entries[done:]))
            try:
                if idle_deaths > _IDLE_DEATHS:
                    raise ValueError(f"reward workers keep dying while idle: {worker.last_words()}")
                self._replace(index)
            except ValueError as error:
                self._give_up(error)
                return

    def _take(self) -> list[_Entry]:
        with self._change:
            while not self._pending and not self._closed:
                self._change.wait()
            share = -(-len(self._pending) // len(self._workers))
            return [self._pending.popleft() for _ in range(min(share, _MOST_AT_ONCE))]

    def _collect(self, worker: _Worker, entries: Sequence[_Entry]) -> tuple[int, str]:
        """Receive grades until all are there or the worker fails; returns how many are settled, and the failure."""
        for number, (_, future) in enumerate(entries, 1):
            try:
                grade = worker.receive(self._timeout_s)
            except TimeoutError:
                error = f"took longer than {self._timeout_s:g} s"
                self._finish(future, Grade(0.0, "timeout", {"error": error}))
                return number, error
            except (EOFError, OSError):
                if self._closed:
                    return number - 1, "closed"
                error = f"the worker process died: {worker.last_words()}"
                self._finish(future, Grade(0.0, "crashed", {"error": error}))
                return number, error
            self._finish(future, grade)
        return len(entries), ""

    def _replace(self, index: int) -> None:
        self._workers[index].kill()
        replacement = self._workers[index].again()
        with self._change:
            self.restarts += 1
            self._workers[index] = replacement
            if self._closed:
                replacement.kill()
                return
        replacement.wait_ready()

    def _give_up(self, error: Exception) -> None:
        """No worker can be had: nothing that waits will ever be graded, so say that instead of hanging."""
        for future in self._no_more():
            future.set_exception(error)

    def _no_more(self) -> list[Future[Grade]]:
        """Closes the grader; returns the futures of all jobs that no worker has taken."""
        with self._change:
            self._closed = True
            waiting = [future for _, future in self._pending]
            self._pending.clear()
            self._change.notify_all()
        return waiting


class _Worker:
    """One worker process and the socket to it."""

    def __init__(self, reward: str, timeout_s: float, memory_mb: int) -> None:
        self._arguments = (reward, timeout_s, memory_mb)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        mine, theirs = socket.socketpair()
        command = [sys.executable, "-m", "sat_jax.rewards.worker", str(theirs.fileno()), *map(str, self._arguments)]
        path = [entry or os.getcwd() for entry in sys.path]
        # A verifier has no business on an accelerator, and must not share the fate of this process's signals.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        self._connection = Connection(mine.detach())

    def again(self) -> _Worker:
        """A fresh worker like this one."""
        return _Worker(*self._arguments)

    def wait_ready(self) -> None:
        """Return once the reward function is loaded; ``ValueError`` where it cannot be."""
        try:
            if not self._connection.poll(_START_LIMIT_S):
                raise ValueError(
                    f"reward {self._arguments[0]} was not loaded within {_START_LIMIT_S:g} s: make its import faster"
                )
            state, message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ValueError(f"reward worker for {self._arguments[0]} did not start: {self.last_words()}") from error
        if state != "ready":
            hint = f"; it had {self._arguments[2]} MiB, see memory_mb" if "MemoryError" in message else ""
            raise ValueError(message + hint)

    def send(self, jobs: Sequence[bytes]) -> None:
        """Hand over pickled jobs; ``OSError`` where the process is gone."""
        self._connection.send(jobs)

    def receive(self, timeout_s: float) -> Grade:
        """The next grade; ``TimeoutError``, or ``EOFError``/``OSError`` where the process is gone."""
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(max(0.0, deadline - time.monotonic())):
            # A busy interpreter may have kept this thread from looking in time: an answer that is there counts.
            if time.monotonic() >= deadline and not self._connection.poll(0):
                raise TimeoutError
        grade = pickle.loads(self._connection.recv_bytes())
        assert isinstance(grade, Grade)
        return grade

    def kill(self) -> None:
        """End the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """Exit status and the last line that the process wrote."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "still running"
        self._stderr.seek(0)
        written = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"exit status {status}" + (f", {written[-1]}" if written else "")


def _pickled(job: GradeJob) -> bytes:
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"metadata of a prompt from {job.source or '?'} cannot be sent to a worker ({error}): "
            "keep plain values in it"
        ) from error
