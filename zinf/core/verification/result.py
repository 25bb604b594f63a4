"""The result of a comparison with plain jax, as a value and as tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from zinf.core.text.tables import aligned
from zinf.core.verification.compare import REASON, Check

SHOWN_LEAVES = 20
NOTE = (
    "Of {} leaves, marked ~, rounding alone may change more than a tenth of the "
    "largest number: that they agree says little."
)


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


@dataclass(frozen=True)
class Verification:
    """The comparison of a few steps on zinf with the same steps in plain jax and optax.

    As a condition it is true if both agree within rounding. It prints as a table.

    Attributes:
        execution: how zinf ran: "streamed", "offloaded" or "fused".
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
        return self.shown()

    def shown(self, *, every: bool = False) -> str:
        """The tables and the verdict.

        Args:
            every: show all leaves, and not only those nearest to their bounds.
        """
        ranked = sorted(self.leaves, key=lambda x: -max(c.share for c in x.checks))
        chosen = set(map(id, ranked if every else ranked[:SHOWN_LEAVES]))
        left = len(self.leaves) - len(chosen)
        noisy = [x for x in self.leaves if any(c.is_noise for c in x.checks)]
        lines = [*self.setting, "", *self._losses(), ""]
        lines += self._leaves([x for x in self.leaves if id(x) in chosen])
        lines += [f"{left:,} more leaves, all closer to their bounds."] if left else []
        lines += ["", REASON]
        lines += [NOTE.format(f"{len(noisy):,}")] if noisy else []
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        steps = f"{len(self.losses)} steps"
        if self:
            return (
                f"They agree: {steps} {self.execution} and in plain jax differ in "
                "losses, gradients and parameters by no more than rounding."
            )
        numbered = enumerate(self.loss_checks, 1)
        wrong = [f"the loss of step {n}" for n, check in numbered if not check.agrees]
        wrong += [leaf.path for leaf in self.different]
        first = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        return (
            f"They differ: of {steps} {self.execution} and in plain jax, {len(wrong)} "
            f"results differ by more than rounding: {first}."
        )

    def _losses(self) -> list[str]:
        rows = [("step", "loss on zinf", "in plain jax", "difference", "allowed", "")]
        pairs = zip(self.losses, self.loss_checks, strict=True)
        for number, ((found, plain), check) in enumerate(pairs, 1):
            row = str(number), f"{found:.8g}", f"{plain:.8g}"
            rows.append((*row, *_cells(check), _mark([check])))
        return aligned(rows, left=(0, 5))

    def _leaves(self, leaves: Sequence[LeafChecks]) -> list[str]:
        rows = [("leaf", "gradient", "allowed", "parameter", "allowed", "")]
        for leaf in leaves:
            name = f"{leaf.path} {leaf.dtype}{list(leaf.shape)}"
            rows.append(
                (name, *_cells(leaf.gradient), *_cells(leaf.param), _mark(leaf.checks))
            )
        return [
            *aligned(rows, left=(0, 5)),
            "Largest difference in the gradient of step 1 and in the parameter after "
            f"step {len(self.losses)}, over the largest number in it.",
        ]


def _cells(check: Check | None) -> tuple[str, str]:
    """The difference and the bound, divided by the largest number unless it is 0."""
    if check is None:
        return "", ""
    over = check.largest or 1.0
    return f"{check.difference / over:.1e}", f"{check.bound / over:.1e}"


def _mark(checks: Sequence[Check]) -> str:
    if not all(check.agrees for check in checks):
        return "DIFFERS"
    return "~" if any(check.is_noise for check in checks) else ""
