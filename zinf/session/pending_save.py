"""The save that goes on beside training."""

from concurrent.futures import Future

from zinf.memory import Stores


class PendingSave:
    """A save that still reads arrays, if there is one.

    An object of its own, so that runners can wait for the save of their engine without
    a reference to the engine: that reference would keep a dropped engine alive.
    """

    def __init__(self) -> None:
        self.future: Future[None] | None = None

    def wait(self) -> None:
        """Waits until nothing is read any more; at once if there is no save."""
        if self.future is not None:
            self.future.result()

    def close(self, stores: Stores) -> None:
        """Closes the stores once no save reads them."""
        self.wait()
        stores.close()
