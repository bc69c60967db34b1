"""What every scheduler here shares: a configuration that survives round trips and refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.configuration_utils import ConfigMixin, FrozenDict
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from genkit.errors import ConfigError, nearest

__all__ = ["ConfiguredScheduler"]


class ConfiguredScheduler(SchedulerMixin, ConfigMixin):
    """diffusers' scheduler mixin with a strict ``from_config``.

    Attributes:
        context_names: the entries of a walk's context that the scheduler reads; a walk refuses all others. None: not
            known, so that nothing is refused.
    """

    order = 1
    context_names: Sequence[str] | None = None

    def register_to_config(self, **kwargs: Any) -> None:
        """Keeps every option in ``config``.

        diffusers marks options that were given by position as defaults, and ``from_config`` then drops them.
        """
        kwargs.pop("_use_default_values", None)
        super().register_to_config(**kwargs)

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """diffusers' ``from_config``, which refuses keys it does not know.

        The ``config`` of a live object of another class (``pipe.scheduler.config``), or a file that names another
        class, carries over the keys that both share, as in diffusers.

        Raises:
            ConfigError: an unknown key, with the nearest known one.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"from_config got a {type(config).__name__}; expected a mapping (for a folder: from_pretrained)"
            )
        foreign = isinstance(config, FrozenDict) or config.get("_class_name", cls.__name__) != cls.__name__
        known = cls._get_init_keys(cls) - {"self"}
        for key in sorted(set(kwargs) | (set() if foreign else set(config))):
            if key not in known and not key.startswith("_"):
                raise ConfigError(f"{cls.__name__} has no option {key!r}.{nearest(key, known)}")
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)
