"""Flattens programs to lists of equations, slices them, and shares equal pieces."""

from zinf.jaxpr.emit import Emitter as Emitter
from zinf.jaxpr.emit import abstract as abstract
from zinf.jaxpr.emit import trace as trace
from zinf.jaxpr.graph import Graph as Graph
from zinf.jaxpr.graph import flatten as flatten
from zinf.jaxpr.graph import inline_all as inline_all
from zinf.jaxpr.graph import inlined as inlined
from zinf.jaxpr.graph import variables as variables
from zinf.jaxpr.passed import passed as passed
from zinf.jaxpr.share import Body as Body
from zinf.jaxpr.share import Piece as Piece
from zinf.jaxpr.share import Shared as Shared
from zinf.jaxpr.share import calls_rule as calls_rule
from zinf.jaxpr.share import share as share
