"""The result of a comparison with plain jax, as a value and as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zinf.core.verification.compare import REASON, Check

SHOWN_LEAVES = 20
WIDTH = 100
# Notebooks give a pre no font of its own.
HTML = '<pre style="line-height:1.2;font-family:monospace">{code}</pre>'


@dataclass(frozen=True)
class LeafChecks:
    """The comparison of one leaf of the parameters or the model state.

    Attributes:
        gradient: the gradient of the first step, before clipping; None if the leaf is
            not trained.
        param: the leaf after the last step.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    gradient: Check | None
    param: Check

    @property
    def checks(self) -> tuple[Check, ...]:
        return (self.param,) if self.gradient is None else (self.gradient, self.param)

    @property
    def agrees(self) -> bool:
        return all(check.agrees for check in self.checks)

    @property
    def excess(self) -> float:
        """The largest ratio of a difference to its bound."""
        return max(_share(check) for check in self.checks)


@dataclass(frozen=True)
class Verification:
    """The comparison of a few steps on zinf with the same steps in plain jax and optax.

    As a condition it is true if both agree within rounding. It prints as a table, also
    in a notebook.

    Attributes:
        execution: how zinf ran: "streamed" or "fused".
        losses: the losses of each step, on zinf and in plain jax.
        loss_checks: the comparison of the losses of each step.
        leaves: the comparison of each leaf, in the order of the tree.
        setting: lines with versions and devices, and with the bytes at rest on each
            tier.
    """

    execution: str
    losses: tuple[tuple[float, float], ...]
    loss_checks: tuple[Check, ...]
    leaves: tuple[LeafChecks, ...]
    setting: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether every loss, gradient and parameter is within its bound."""
        return all(check.agrees for check in self.loss_checks) and not self.different

    @property
    def different(self) -> tuple[LeafChecks, ...]:
        """The leaves that exceed their bounds."""
        return tuple(leaf for leaf in self.leaves if not leaf.agrees)

    def __bool__(self) -> bool:
        return self.agrees

    def __repr__(self) -> str:
        with (console := self._console()).capture() as printed:
            console.print(self.shown())
        return printed.get().rstrip()

    def _repr_html_(self) -> str:
        console = self._console()
        console.print(self.shown())
        return console.export_html(inline_styles=True, code_format=HTML)

    def _console(self) -> Console:
        # In Jupyter, rich would also display what is printed, and with the codes of a
        # terminal, since the kernel sets FORCE_COLOR.
        plain = {"highlight": False, "markup": False}
        nowhere = {"force_jupyter": False, "force_terminal": False}
        return Console(file=StringIO(), width=WIDTH, record=True, **plain, **nowhere)

    def shown(self, *, every: bool = False) -> RenderableType:
        """The tables.

        Args:
            every: show all leaves, and not only the worst.
        """
        ranked = sorted(self.leaves, key=lambda leaf: -leaf.excess)
        chosen = set(map(id, self.leaves if every else ranked[:SHOWN_LEAVES]))
        leaves = [leaf for leaf in self.leaves if id(leaf) in chosen]
        left = len(self.leaves) - len(leaves)
        more = [f"{left:,} more leaves, all closer to their bounds."] if left else []
        return Group(
            *self.setting,
            "",
            self._loss_table(),
            "",
            self._leaf_table(leaves),
            *more,
            "",
            REASON,
            *self._noise(),
            Text(self.verdict, style="bold green" if self else "bold red"),
        )

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        steps = f"{len(self.losses)} steps"
        if self:
            return (
                f"They agree: {steps} {self.execution} and in plain jax differ in "
                "losses, gradients and parameters by no more than rounding."
            )
        wrong = [f"the loss of step {n}" for n in self._wrong_steps()]
        wrong += [leaf.path for leaf in self.different]
        first = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        return (
            f"They differ: of {steps} {self.execution} and in plain jax, {len(wrong)} "
            f"results differ by more than rounding: {first}."
        )

    def _wrong_steps(self) -> Iterator[int]:
        for number, check in enumerate(self.loss_checks, 1):
            if not check.agrees:
                yield number

    def _noise(self) -> list[str]:
        noisy = [leaf for leaf in self.leaves if any(c.is_noise for c in leaf.checks)]
        if not noisy:
            return []
        return [
            f"Of {len(noisy):,} leaves, marked ~, rounding alone may change more than "
            "a tenth of the largest number: that they agree says little."
        ]

    def _loss_table(self) -> Table:
        table = _table("step", "loss on zinf", "in plain jax", "difference", "allowed")
        pairs = zip(self.losses, self.loss_checks, strict=True)
        for number, ((found, plain), check) in enumerate(pairs, 1):
            row = str(number), f"{found:.8g}", f"{plain:.8g}"
            table.add_row(*row, *_cells(check), _mark([check]))
        return table

    def _leaf_table(self, leaves: Sequence[LeafChecks]) -> Table:
        table = _table("leaf", "gradient", "allowed", "parameter", "allowed")
        table.columns[0].overflow = "fold"
        for leaf in leaves:
            shape = f"{leaf.path} {leaf.dtype}{list(leaf.shape)}"
            gradient = ("", "") if leaf.gradient is None else _cells(leaf.gradient)
            table.add_row(shape, *gradient, *_cells(leaf.param), _mark(leaf.checks))
        table.caption = (
            "Largest difference in the gradient of step 1 and in the parameter after "
            f"step {len(self.losses)}, over the largest number in it."
        )
        table.caption_justify = "left"
        return table


def _table(first: str, *names: str) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    return table


def _cells(check: Check) -> tuple[str, str]:
    """The difference and the bound, divided by the largest number unless it is 0."""
    over = check.largest or 1.0
    return f"{check.difference / over:.1e}", f"{check.bound / over:.1e}"


def _mark(checks: Sequence[Check]) -> Text:
    if not all(check.agrees for check in checks):
        return Text("DIFFERS", style="bold red")
    return Text("~" if any(check.is_noise for check in checks) else "", style="dim")


def _share(check: Check) -> float:
    if check.difference == 0:
        return 0.0
    return check.difference / check.bound if check.bound else float("inf")
