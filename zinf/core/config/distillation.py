"""The `distillation` section: a trained model that teaches another one."""

from zinf.core.config.scalar import Count, Folder, Positive, Whole
from zinf.core.config.section import Section


class Distillation(Section):
    """Trains on the predictions of a teacher too, https://arxiv.org/abs/1503.02531.

    The teacher runs forward alone, on its own tiers, within the budgets of its config
    and of this one, which count the bytes of both models.
    """

    teacher: Folder
    """Config file of the run of `zinf train` that made the teacher. With
    `model.huggingface`: a model of transformers, as a folder or a name."""

    step: Whole | None = None
    """Of the run's checkpoint that is the teacher; null: the newest."""

    coefficient: Positive = 1.0
    """The mean divergence from the teacher is added to the loss so many times."""

    temperature: Positive = 1.0
    """Logits of both are divided by it."""

    until_step: Count | None = None
    """The teacher is left out after so many steps, as in a Mixture-of-Students
    (https://arxiv.org/abs/2201.05596, section 4.2.2); null: never."""
