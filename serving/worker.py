"""The one thread that uses a service's engine: commands and steps, one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jaxstate.executor import Executor
from jaxstate.metrics import Metrics
from jaxstate.scheduler import Scheduler
from jaxstate.serving import garbage
from jaxstate.serving.after_steps import AfterSteps
from jaxstate.serving.bursts import BURST_GAP_S
from jaxstate.serving.commands import Commands
from jaxstate.serving.compilations import Compilations
from jaxstate.serving.durable import Durable


class Worker:
    """Runs commands and steps until there are to be no more.

    Attributes:
      step_s: what a step has taken of late, seconds.
    """

    def __init__(
        self,
        commands: Commands,
        executor: Executor,
        scheduler: Scheduler,
        durable: Durable,
        after: AfterSteps,
        metrics: Metrics,
        clock: Callable[[], float],
    ):
        """Prepare the thread; `durable` is closed at its end."""
        self._commands = commands
        self._executor = executor
        self._scheduler = scheduler
        self._durable = durable
        self._after = after
        self._metrics = metrics
        self._clock = clock
        self.step_s = 0.01
        self._thread = threading.Thread(target=self._run, name="jaxstate-worker", daemon=True)

    def start(self) -> None:
        """Begin; from now on nobody else may use the engine."""
        self._thread.start()

    def close(self) -> None:
        """End what is under way, and wait until it has ended."""
        self._commands.close()
        self._thread.join()

    def _run(self) -> None:
        """Work; whatever ends it, nobody waits for ever."""
        try:
            with Compilations() as compilations, garbage.deferred():
                self._work(compilations)
            self._after.note_gates()
            self._scheduler.end(self._clock())  # what runs keeps a session from being saved
            self._durable.end()
        except BaseException as error:
            self._commands.failure = error
            raise
        finally:
            self._durable.close()
            with self._commands.changed:
                self._commands.is_closing = self._commands.has_ended = True
                self._scheduler.end(self._clock(), self._commands.closed())
                self._durable.release(self._commands.failure)
                self._commands.notify()

    def _work(self, compilations: Compilations) -> None:
        """Run commands and steps until the service is closed."""
        commands, after = self._commands, self._after
        rests: list[float] = []  # seconds until there is something to save, or to collect
        has_rested = False
        pools_lost = self._executor.pools_lost
        while True:
            with commands.changed:
                commands.notify()
                if not len(commands) and not commands.is_closing:
                    if after.is_idle:
                        if not after.maintain():
                            has_rested = not commands.changed.wait(min(rests, default=None))
                    elif not self._scheduler.num_waiting:
                        commands.changed.wait(BURST_GAP_S)  # until a burst is over
                taken = commands.take()
                if commands.is_closing:
                    return
            if has_rested and not taken:
                garbage.collect()
            has_rested = False
            for command in taken:
                command()
            if taken:
                with commands.changed:  # nobody waits for a step to see his verb submitted
                    commands.changed.notify_all()
            began = self._clock()
            step = self._scheduler.step(began, self._clock)
            if step.tokens:
                took = self._clock() - began
                self._metrics.note_step(took)
                self.step_s += 0.1 * (took - self.step_s)
            if self._executor.pools_lost > pools_lost:
                pools_lost = self._executor.pools_lost
                after.revive_all()
            self._metrics.compilations = compilations.count
            self._durable.commit()
            with commands.changed:  # who is told of an end finds what follows from it
                self._durable.release()
                after.note_ends()
                changing = after.changing()
                after.evaluate(changing)
                after.preposition(changing)
            due = (self._durable.rest(self._clock()), garbage.rest_s()) if after.is_idle else ()
            rests = [one for one in due if one is not None]
