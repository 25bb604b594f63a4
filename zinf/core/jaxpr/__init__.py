"""Flattens programs to lists of equations, slices them, and shares equal pieces."""

from zinf.core.jaxpr.emit import Emitter as Emitter
from zinf.core.jaxpr.emit import abstract as abstract
from zinf.core.jaxpr.emit import renamed as renamed
from zinf.core.jaxpr.emit import trace as trace
from zinf.core.jaxpr.graph import Graph as Graph
from zinf.core.jaxpr.graph import flatten as flatten
from zinf.core.jaxpr.graph import inline_all as inline_all
from zinf.core.jaxpr.graph import inlined as inlined
from zinf.core.jaxpr.graph import variables as variables
from zinf.core.jaxpr.graph import written as written
from zinf.core.jaxpr.passed import passed as passed
from zinf.core.jaxpr.share import Body as Body
from zinf.core.jaxpr.share import Piece as Piece
from zinf.core.jaxpr.share import Shared as Shared
from zinf.core.jaxpr.share import calls_rule as calls_rule
from zinf.core.jaxpr.share import share as share
