"""Records the settings of a trainer's optimizers whenever an optimizer is about to read its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MAX_NAMES = 500
"""Most parameter names that a rank lists, so that the manifest of many ranks stays small."""
_MAX_TEXT = 80


class SettingsLog:
    """A log of the settings of each parameter group. After a group's first entry, only changed settings are logged.

    For example, if the learning rate of group 1 of the first optimizer changes in step 3:

            {"step": 3, "group": "0.1", "settings": {"lr": "0.0009"}}

    A group's first entry also has "optimizer" and "parameters".
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._last: dict[str, dict[str, str]] = {}
        self._names_left = _MAX_NAMES

    def note(self, step: int, number: int, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Log those settings of an optimizer that have changed since the previous call; at the first call, log all.

        `number` is the optimizer's index in the step. `names` maps a parameter's id to its name.
        """
        for index, settings in enumerate(optimizer.param_groups):
            group = f"{number}.{index}"
            found = {key: text for key, value in settings.items() if key != "params" and (text := _text_of(value))}
            before = self._last.get(group)
            changed = {key: text for key, text in found.items() if before is None or before.get(key) != text}
            self._last[group] = found
            if before is None:
                # The first entry of a group names its parameters; later entries need only the group's number.
                held = [names[id(p)] for p in settings["params"] if id(p) in names][: self._names_left]
                self._names_left -= len(held)
                whose = {"optimizer": type(optimizer).__name__, "parameters": held}
                self.entries.append({"step": step, "group": group, **whose, "settings": changed})
            elif changed:
                self.entries.append({"step": step, "group": group, "settings": changed})


def _text_of(value: Any) -> str:
    from torch import Tensor

    # Reading a tensor on a GPU would wait for the GPU.
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and value.device.type == "cpu" else object()
    if isinstance(value, (list, tuple)):
        parts = [_text_of(each) for each in value]
        return f"({', '.join(parts)})"[:_MAX_TEXT] if all(parts) else ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A number's type changes no bit: 0, 0.0 and numpy's 0.0 are one setting.
        return repr(float(value)) if abs(value) < 1e300 else repr(value)[:_MAX_TEXT]
    return repr(value)[:_MAX_TEXT] if value is None or isinstance(value, (bool, str)) else ""
