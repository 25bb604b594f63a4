"""The save that runs in the background of training."""

from concurrent.futures import Future

from zinf.core.memory import Stores


class PendingSave:
    """A save that still reads arrays, if there is one.

    Runners refer to this object in order to wait for the save. A reference to the
    engine would keep a dropped engine alive.
    """

    def __init__(self) -> None:
        self.future: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the save reads no array any more; at once if there is none."""
        if self.future is not None:
            self.future.result()

    def close(self, stores: Stores) -> None:
        """Close the stores when no save reads them any more."""
        self.wait()
        stores.close()
