"""The `distillation` section: a trained model that teaches another one."""

from zinf.config.scalar import Count, Folder, Positive
from zinf.config.section import Section


class Distillation(Section):
    """Trains on the predictions of a teacher too, https://arxiv.org/abs/1503.02531.

    The teacher runs forward alone, within the budgets of its own config.
    """

    teacher: Folder
    """Config file of the run of `zinf train` whose newest checkpoint is the teacher."""

    coefficient: Positive = 1.0
    """The mean divergence from the teacher is added to the loss so many times."""

    temperature: Positive = 1.0
    """Logits of both are divided by it."""

    until_step: Count | None = None
    """The teacher is left out after so many steps, as in a Mixture-of-Students
    (https://arxiv.org/abs/2201.05596, section 4.2.2); null: never."""
