"""The command line `zinf`."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.cli.app import app as app
    from zinf.cli.endings import INTERRUPTED as INTERRUPTED
    from zinf.cli.entry import main as main
    from zinf.cli.errors import USER_ERROR as USER_ERROR

make_lazy(__name__)
