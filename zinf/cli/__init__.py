"""The command line."""

from zinf.cli.app import app as app
from zinf.cli.errors import INTERRUPTED as INTERRUPTED
from zinf.cli.errors import USER_ERROR as USER_ERROR
