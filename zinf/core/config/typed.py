"""Sections of the form `{type: ..., params: ...}`, with parameters by type."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import (
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from zinf.core.config.nearest import did_you_mean
from zinf.core.config.section import Section

SectionClass = type[Section]


class TypedSection(Section):
    """A type and its parameters."""

    KNOWN: ClassVar[Mapping[str, SectionClass]] = {}
    ANY: ClassVar[SectionClass] = Section
    NOT_YET: ClassVar[tuple[str, ...]] = ()

    type: str
    """The type's name, in any case."""

    params: SerializeAsAny[Section]
    """The parameters of that type."""

    @classmethod
    def section_at(cls, key: str, siblings: Mapping[str, Any]) -> SectionClass | None:
        if key != "params":
            return None
        name = str(siblings.get("type")).lower()
        return next((cls.KNOWN[k] for k in cls.KNOWN if k.lower() == name), None)

    @model_validator(mode="before")
    @classmethod
    def _default_params(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("params") is None:
            return {**data, "params": {}}
        return data

    @field_validator("type", mode="before")
    @classmethod
    def _canonical(cls, name: object) -> str:
        known = ", ".join(cls.KNOWN)
        if not isinstance(name, str):
            raise ValueError(f"must be one of {known}")
        for option in cls.KNOWN:
            if option.lower() == name.lower():
                return option
        if name.lower() in (option.lower() for option in cls.NOT_YET):
            raise ValueError(f"not supported yet. It must be one of {known}")
        raise ValueError(f"must be one of {known}.{did_you_mean(name, cls.KNOWN)}")

    @field_validator("params", mode="before")
    @classmethod
    def _params_of_type(cls, value: Any, info: ValidationInfo) -> Section:
        if "type" not in info.data:
            # The type is wrong and reported, so its parameters cannot be checked.
            return cls.ANY()
        return cls.KNOWN[info.data["type"]].model_validate(value)
