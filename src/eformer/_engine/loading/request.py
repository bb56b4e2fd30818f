"""The arguments of a load, as frozen values, and the report of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eformer._engine.formats.quantized import dtype_of_dequant
from eformer._engine.record.dtypes import floating_dtype
from eformer._engine.record.options import LoadOptions
from eformer._engine.record.text import count, few, glance

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.rename import RenamingRules
    from eformer._engine.stores.keys import PublicKey
    from eformer._engine.tasks.progress import Progress

Rules = Mapping[str, "PartitionSpec"] | Sequence[tuple[str, "PartitionSpec"]]
_ResizeOne = Callable[[Any, Any], Any]
Resize = Callable[[Any, Any, str], Any] | Mapping[str, _ResizeOne] | Sequence[tuple[str, _ResizeOne]]


_DEFAULT = LoadOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Arguments of `load` that place leaves, and options of `eformer.serialization`:

    every_leaf         require `shardings` to name every leaf; raise KeyError otherwise
    replicate          replicate leaves over the mesh if no argument and no record places them
    moves_numpy        put numpy arrays on the mesh, too, if JAX can hold them
    rules_name         name of the caller's argument for the rules, used in messages
    is_current_mesh    the mesh comes from `jax.set_mesh`, not from an argument: it never makes a load fail
    """

    mesh: Mesh | None = None
    rules: Rules | None = None
    shardings: Any = None
    every_leaf: bool = False
    replicate: bool = False
    moves_numpy: bool = False
    rules_name: str = "rules"
    is_current_mesh: bool = False

    def __post_init__(self) -> None:
        if callable(self.rules):
            raise TypeError(
                f"{self.rules_name}= is a function; expected pairs of a pattern and a PartitionSpec. "
                "shardings= takes a function of each leaf"
            )
        if not isinstance(
            self.rules, (Mapping, type(None))
        ):  # a load may start again, and the first attempt would use up an iterator
            object.__setattr__(self, "rules", tuple(self.rules))

    @property
    def rule_pairs(self) -> Sequence[tuple[str, PartitionSpec]]:
        """Return the rules as pairs."""
        return tuple(self.rules.items()) if isinstance(self.rules, Mapping) else self.rules or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Arguments of `load`, and options of runs and of `eformer.serialization`:

    in_place       update the modules of `like` in place: the caller has passed it as `into`
    like_name      name of the caller's argument for `like`, used in messages
    timeout_of     name of the caller's options with the timeout, used in messages
    reshape        accept a leaf of another shape than in `like` if it has as many elements
    threads        number of threads that read; None for one per core, 2 to 16
    sha256         function that returns the recorded SHA-256 of leaves, which are checked before the load
    transient      names of subtrees of `like` that the program rebuilds: their leaves may be missing or left out
    back           read the recorded rules from right to left, if `rename` is None
    config         config.json of the model, for the rules; None for the file beside the checkpoint
    step           the step of a run to load; None for the newest
    plain          put nested dicts in the place of classes that cannot be built
    is_list        several checkpoints are loaded as one
    whole_of       for a near step, which has only the boxes of this process: function that describes it as the whole
                   tree. Leaves are read with the sharding of the save, then moved between the devices
    """

    like: Any = None
    in_place: bool = False
    partial: bool = False
    root: str | None = None
    rename: RenamingRules | None = None
    back: bool = False
    config: Mapping[str, Any] | None = None
    resize: Resize | None = None
    prefix: str | None = None
    keys: tuple[str, ...] | None = None
    placement: PlacementRequest = field(default_factory=PlacementRequest)
    dtype: Any = None
    callback: Callable[[Any, str], Any] | None = None
    verify: bool = True
    mmap: bool = False
    progress: Progress = None
    options: LoadOptions = _DEFAULT
    signed_by: PublicKey | None = None
    dequant: Any = None
    duplicates: Literal["last"] | None = None
    like_name: str = "like"
    timeout_of: str = "LoadOptions"
    reshape: bool = False
    threads: int | None = None
    sha256: Callable[[TreeEntry], Mapping[str, str]] | None = None
    transient: tuple[str, ...] = ()
    step: StepChoice = None
    plain: bool = False
    is_list: bool = False
    whole_of: Callable[[Found], Found] | None = None

    @property
    def by_rules(self) -> bool:
        """Tell whether rules give the leaves their names."""
        return self.rename is not None or self.back

    def __post_init__(self) -> None:
        dtype_of_dequant(self.dequant)
        if self.duplicates not in (None, "last"):
            raise ValueError(f"duplicates={self.duplicates!r}: expected 'last', or None, which refuses them")
        if self.is_list and self.step is not None:
            raise ValueError(f"step={self.step!r} is for the path of one run, not for a list of paths")
        if self.plain and self.like is not None:
            raise ValueError(f"plain=True excludes {self.like_name}=, which gives the classes of the tree")
        if self.like is None and (self.partial or self.resize is not None or self.dtype is not None):
            self._refuse_without_like()

    def _refuse_without_like(self) -> None:
        needy = {"partial": self.partial, "resize": self.resize is not None, 'dtype="like"': self.casts_like}
        if not (alone := [name for name, is_given in needy.items() if is_given]):
            return
        needs = "needs" if len(alone) == 1 else "need"
        trees = "template=, which gives" if self.is_template else "like= or into=, which give"
        raise ValueError(f"{' and '.join(alone)} {needs} {trees} the structure and shapes of the tree")

    @property
    def is_template(self) -> bool:
        """Tell whether the caller is `AsyncCheckpointManager`, whose `template` is `like`; it has no `partial`, `root`,
        `rename` and `resize`."""
        return self.like_name == "template"

    @property
    def could_be_list(self) -> bool:
        """Tell whether the caller is `load` with one path, which could be a list."""
        return self.timeout_of == "LoadOptions" and not self.is_template and not self.is_list

    @property
    def casts_like(self) -> bool:
        """Tell whether each floating leaf is cast to the dtype that it has in `like`."""
        return isinstance(self.dtype, str) and self.dtype == "like"

    @property
    def cast(self) -> str | None:
        """Return the name of the dtype that all floating leaves are cast to; None without such a dtype."""
        return None if self.dtype is None or self.casts_like else floating_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """List the leaves of a load by name, and where each came from.

    loaded      leaves from the checkpoint
    kept        leaves from `like`, because the checkpoint lacks them
    left_out    leaves of the checkpoint that `like` lacks, or that a rule leaves out, and scales of activations beside
                quantised weights
    resized     loaded leaves that `resize` brought to the shape in `like`
    code        functions from `like`, because a checkpoint does not hold functions
    dequantized
                loaded leaves that are quantised in the checkpoint, and were read as numbers
    dequant     the dtypes of these numbers
    origin      the checkpoints and the rules that the tree was made by, for `save(origin=)` and `Run(origin=)`

    Example:

        >>> state, report = checkpoint.load("run/step-100", like=state, partial=True, return_report=True)
        >>> report.kept, report.left_out
        ((), ())
    """

    loaded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    dequantized: tuple[str, ...] = ()
    dequant: tuple[str, ...] = ()
    origin: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        others = {
            "of them resized": self.resized,
            f"of them dequantised to {' and '.join(self.dequant)}": self.dequantized,
            "kept as they were": self.kept,
            "of the checkpoint left out": self.left_out,
            "left to the code": self.code,
        }
        loaded = f"{count(len(self.loaded), 'leaf', 'leaves')} loaded"
        return ", ".join([loaded, *(f"{len(n)} {what} ({few(n)})" for what, n in others.items() if n)])
