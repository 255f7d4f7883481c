"""The process in which reward functions run: ``python -m sat_jax.rewards.worker FD REWARD TIMEOUT_S MEMORY_MB``.

It speaks over one inherited socket. It first says ``("ready", "")`` or ``("failed", why)``; then it receives lists of
pickled jobs and sends one ``Grade`` per job, in order, each as soon as it is there. It ends when the other side closes
the socket.
"""

from __future__ import annotations

import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection

from sat_jax.rewards.functions import Grade, load_reward, run_reward


def serve(connection: Connection, reward: str, timeout_s: float, memory_mb: int) -> None:
    """Load the reward function, then grade until the connection closes."""
    if memory_mb:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_mb * 2**20 if most == resource.RLIM_INFINITY else min(memory_mb * 2**20, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        function = load_reward(reward)
    except ValueError as error:
        connection.send(("failed", str(error)))
        return
    connection.send(("ready", ""))
    while True:
        try:
            jobs = connection.recv()
        except EOFError:
            return
        for job in jobs:
            # The owner kills a worker that takes too long. Should the owner be gone, this does: the default action of
            # SIGALRM needs no interpreter, and thus ends an endless big-integer power too.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 5)
            grade = run_reward(function, pickle.loads(job))
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                payload = pickle.dumps(grade)
            except Exception as error:  # noqa: BLE001 - pickling runs the __reduce__ of whatever the reward returned
                reason = f"the reward's answer cannot be sent between processes ({error}): return plain values"
                payload = pickle.dumps(Grade(0.0, "error", {"error": reason}))
            connection.send_bytes(payload)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
