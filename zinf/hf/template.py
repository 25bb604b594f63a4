"""Chat templates, whose work is bounded.

A template is a program that comes with a model. jinja2's sandbox keeps it from files
and from Python, but lets it loop and double texts without end. Here what an expression
comes to costs work, and a conversation has a budget of it. The templates are compiled
as `transformers` does, with these costs added to their syntax tree.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from math import prod
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from zinf.hf.records import as_parts

# A step of a loop, or a call, takes as long as some hundred characters are copied.
STEP, ENTRY, CHARACTER = 100, 25, 1
# Some seconds. A conversation of 2,000 messages takes a tenth of it.
MAX_WORK = 2 * 10**8
MAX_BITS = 4096
# Filters and methods whose result may be as long as the product of what they take.
MULTIPLYING = ("join", "replace")
# Widths and precisions in texts for `%` and for `format`. `*` takes its from a value.
PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
BRACES = re.compile(r"[:.]\D{0,3}(\d+)")
# A text that no template has itself.
PROBE = "zinf asks"

_left: ContextVar[list[int] | None] = ContextVar("left", default=None)


def apply_template(tokenizer: Any, messages: Any, **named: Any) -> Any:
    """`tokenizer.apply_chat_template(messages, **named)`, with bounded work.

    Where a template would leave texts out that are no parts, they become parts.

    Raises:
        jinja2.TemplateError: the template takes too much work, or what it raises.
    """
    template, ends = tokenizer.chat_template, (tokenizer.bos_token, tokenizer.eos_token)
    if isinstance(template, str) and _reads_parts_alone(template, *ends):
        messages = [as_parts(message) for message in messages]
    with _bounded(str(tokenizer.name_or_path)):
        return tokenizer.apply_chat_template(messages, **named)


@lru_cache(maxsize=8)
def _reads_parts_alone(template: str, begin: str | None, end: str | None) -> bool:
    """Whether a template lays out parts, and drops contents that are texts.

    It does if it loops over contents without asking what they are (LLaVA, SmolVLM).
    """
    as_text = {"role": "user", "content": PROBE}
    tokens = {"bos_token": begin or "", "eos_token": end or ""}

    def is_shown(message: Mapping[str, Any]) -> bool:
        given = {"conversations": [[message]], "chat_template": template}
        with _bounded(""):
            texts, _ = chat_template_utils.render_jinja_template(**given, **tokens)
        return PROBE in texts[0]

    try:
        return not is_shown(as_text) and is_shown(as_parts(as_text))
    except Exception:  # A template is a program, and raises what it likes.
        return False


@contextmanager
def _bounded(name: str) -> Iterator[None]:
    before = chat_template_utils._compile_jinja_template
    token = _left.set([MAX_WORK])
    chat_template_utils._compile_jinja_template = _compiled
    try:
        yield
    except _TooMuchError as error:
        raise jinja2.TemplateError(
            f"the template{name and ' of '}{name} {error}. Use the one that came with "
            "the model."
        ) from None
    finally:
        chat_template_utils._compile_jinja_template = before
        _left.reset(token)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = chat_template_utils._cached_compile_jinja_template("").environment
    environment.globals.pop("lipsum")  # texts of any length
    for name in MULTIPLYING:
        environment.filters[name] = _multiplying(environment.filters[name])
    environment.filters["format"] = _formatting(environment.filters["format"])
    environment.call = partial(_call, environment.call)
    environment.filters |= {
        "counted": _counted,
        "counted_loop": _counted_loop,
        "counted_size": _counted_size,
        "counted_product": _product,
        "counted_power": _power,
        "counted_rest": _rest,
    }
    tree = _Counting().visit(environment.parse(template))
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _TooMuchError(Exception):
    """What a template does too much of, as the end of a sentence."""


class _Counting(NodeTransformer):
    """Adds the filters below to what a template computes."""

    def generic_visit(self, node: nodes.Node, *args: Any, **named: Any) -> nodes.Node:
        super().generic_visit(node, *args, **named)
        match node:
            case nodes.For():
                node.iter = _through("counted_loop", node.iter)
            case nodes.Output():
                node.nodes = [_through("counted", _constant(x)) for x in node.nodes]
            case nodes.CallBlock():
                # It must be a call itself; what it comes to is counted in its body.
                if isinstance(node.call, nodes.Filter):
                    node.call = node.call.node
            case nodes.Filter() | nodes.Test():
                if node.node is not None:
                    node.node = _through("counted", node.node)
                node.args = [_through("counted_size", x) for x in node.args]
                for pair in node.kwargs:
                    pair.value = _through("counted_size", pair.value)
                return _through("counted", node)
            case nodes.Call():
                if isinstance(node.node, nodes.Getattr):
                    node.node.node = _through("counted", node.node.node)
                    node.args = [_through("counted_size", x) for x in node.args]
                elif isinstance(node.node, nodes.Name) and node.node.name == "loop":
                    node.args = [_through("counted_loop", x) for x in node.args]
                return _through("counted", node)
            case nodes.Compare():
                node.expr = _through("counted", node.expr)
                for operand in node.ops:
                    operand.expr = _through("counted", operand.expr)
            case nodes.Mul():
                return _through("counted_product", node.left, node.right)
            case nodes.Mod():
                return _through("counted_rest", node.left, node.right)
            case nodes.Pow():
                return _through("counted_power", node.left, node.right)
            case nodes.Concat() | nodes.BinExpr() | nodes.Getitem(arg=nodes.Slice()):
                return _through("counted", node)
        return node


def _through(name: str, node: nodes.Node, *args: nodes.Node) -> Any:
    found = nodes.Filter(node, name, list(args), [], None, None)
    return found.set_lineno(node.lineno)


def _constant(node: nodes.Node) -> nodes.Node:
    is_text = isinstance(node, nodes.TemplateData)
    return nodes.Const(node.data).set_lineno(node.lineno) if is_text else node


# jinja2 computes no filter that takes the context as it compiles.
@jinja2.pass_context
def _counted(_: Any, value: Any) -> Any:
    _spend(STEP + _size(value))
    return value


@jinja2.pass_context
def _counted_loop(_: Any, values: Iterable[Any]) -> Iterable[Any]:
    """Count the steps of a loop: at once if their number is known."""
    if isinstance(values, str | list | tuple | dict | range):
        _spend(STEP * len(values))
        return values
    return _stepwise(values)


def _stepwise(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend(STEP)
        yield value


@jinja2.pass_context
def _counted_size(_: Any, value: Any) -> Any:
    """Count an argument that may be a size, as that of `text.ljust(size)`."""
    _spend(STEP + (abs(value) if isinstance(value, int) else _size(value)))
    return value


@jinja2.pass_context
def _product(_: Any, left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and not isinstance(other, int | float):
            _spend(abs(one) * _size(other))
    return _counted(_, left * right)


def _multiplying(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with jinja2's mark of what a filter takes first
    def checked(*given: Any) -> Any:
        _spend(prod(max(_size(value), 1) for value in given))
        return function(*given)

    return checked


def _formatting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(text: Any, *given: Any, **named: Any) -> Any:
        _spend_widths(PERCENT, text)
        return function(text, *given, **named)

    return checked


def _spend_widths(widths: re.Pattern, text: Any) -> None:
    """Count the widths that a format string asks for."""
    if isinstance(text, str):
        found = (n for match in widths.finditer(text) for n in match.groups() if n)
        _spend(sum(int(n) for n in found if n.isdecimal()))


def _call(
    call: Callable[..., Any], context: Any, function: Any, *given: Any, **named: Any
) -> Any:
    """Call a function for a template, after counting the work that it may do."""
    name = getattr(function, "__name__", None)
    if name in MULTIPLYING:
        sizes = map(_size, (getattr(function, "__self__", None), *given))
        _spend(prod(max(size, 1) for size in sizes))
    elif name in ("format", "format_map"):
        # The sandbox wraps the method of a text.
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        _spend_widths(BRACES, text)
    return call(context, function, *given, **named)


@jinja2.pass_context
def _rest(_: Any, left: Any, right: Any) -> Any:
    """`left % right`, which formats if `left` is a text."""
    _spend_widths(PERCENT, left)
    if isinstance(left, str) and "*" in left and isinstance(right, tuple):
        _spend(sum(abs(x) for x in right if isinstance(x, int)))
    return _counted(_, left % right)


@jinja2.pass_context
def _power(_: Any, left: Any, right: Any) -> Any:
    if isinstance(right, int) and abs(right) > MAX_BITS:
        raise _TooMuchError(f"takes the power {right:.3g}")
    return _counted(_, left**right)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return CHARACTER * len(value)
    if isinstance(value, list | tuple | dict | range):
        return ENTRY * len(value)
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _TooMuchError(f"makes a number of more than {MAX_BITS:,} bits")
    return 0


def _spend(work: int) -> None:
    left = _left.get()
    if left is None:
        return
    left[0] -= work
    if left[0] < 0:
        raise _TooMuchError(
            f"takes more than {MAX_WORK // STEP:,} steps, or {MAX_WORK:,} characters, "
            "for one conversation"
        )
