"""install(): the stock `pretrain()` of megatron.training builds, attaches, loads and saves.

Functions of megatron.training are replaced until `uninstall`, where its own code looks them up:

    add_megatron_arguments         adds `--zerocast-recipe` to the command line
    setup_model_and_optimizer      ranks compare their recipes, then, inside `quantized_params()`,
      correct_amax_history_...     the last call before the model is wrapped: quantizes it
      _ddp_wrap                    gives the model the layout of whole matrices, under Muon
      get_megatron_optimizer       attaches the optimizer, before a checkpoint is loaded
      load_checkpoint              masters start from loaded values, not from their rounded weights
    generate_state_dict            quantized weights become plain values, to save and to load
    train_step                     raises for a model that was built before `install`
    check_param_hashes_...         hashes values of quantized weights
    calc_params_l2_norm            uses norms of masters in CPU memory
"""

import contextlib
import functools
import importlib
import weakref
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from zerocast import Recipe, quantize_
from zerocast.distributed.agreement import largest_of_ranks, validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.formats.recipe import RecipeLike
from zerocast.integrations import Patch, Patches, replaced

from . import host, layout, validate
from .attachment import Attachment, attach
from .building import quantized_params
from .checkpoint import dequantize_
from .offload import including_cpu_masters
from .primary import is_primary, weight_of

FLAG = "--zerocast-recipe"
# The functions that quantize and attach, in place of Megatron's, while it sets up a model.
_CALLED_BY_SETUP = ("correct_amax_history_if_needed", "get_megatron_optimizer")
_installed: "Installation | None" = None


def training() -> Any:
    """Return the module of `pretrain`. Raises RuntimeError if it cannot be imported."""
    try:
        return importlib.import_module(host.TRAINING)
    except ImportError as error:
        raise RuntimeError(
            f"megatron.training cannot be imported: {error}. It comes with a checkout of Megatron-LM, and with megatron-core "
            "from 0.17 on; 0.18 and later need Python 3.12"
        ) from error


def model_builders() -> list[Any]:
    """Return the modules that build models, and call `correct_amax_history_if_needed` before they
    wrap them. Older releases have one.
    """
    builders = [training()]
    with contextlib.suppress(ImportError):
        builders.append(importlib.import_module(host.MODEL_BUILDERS))
    return builders


class Installation:
    """An installation in megatron.training, as `install` returns it.

    Args:
        recipe: the recipe given to `install`; None if the command line has it.
        verify_every: the number of steps between two verifications, from the same source.
    """

    def __init__(self, recipe: Recipe | None, verify_every: int | None) -> None:
        self._recipe = recipe
        self._verify_every = verify_every
        # Weak: an attachment lives as long as the optimizer whose methods refer to it.
        self._attachments: list[weakref.ref[Attachment]] = []
        # The optimizers that `setup_model_and_optimizer` has built since `install`.
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches = Patches()

    @property
    def attachments(self) -> list[Attachment]:
        """The attachments of models that are still alive, oldest first, for `zerocast.verify`."""
        return [attachment for ref in self._attachments if (attachment := ref()) is not None]

    def patches(self) -> Iterator[Patch]:
        """Yield patches of the functions of megatron.training, for the time until `uninstall`."""
        loop, checkpointing = training(), host.module(host.CHECKPOINTING)
        arguments = host.module(host.ARGUMENTS)
        add, setup = arguments.add_megatron_arguments, loop.setup_model_and_optimizer
        generate, step = checkpointing.generate_state_dict, loop.train_step

        @functools.wraps(setup)
        def set_up(*args: Any, **kwargs: Any) -> Any:
            return self._set_up(functools.partial(setup, *args, **kwargs))

        @functools.wraps(generate)
        def plain_state_dict(*args: Any, **kwargs: Any) -> Any:
            is_loading = (kwargs.get("optim_sd_kwargs") or {}).get("is_loading", False)
            return dequantize_(generate(*args, **kwargs), is_loading=is_loading)

        @functools.wraps(step)
        def checked_step(forward_step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if optimizer not in self._optimizers:
                raise RuntimeError(
                    "install() came after setup_model_and_optimizer, or this model was built by something else: nothing of it is "
                    "quantized. Call zerocast.integrations.megatron.install(recipe) before pretrain()"
                )
            return step(forward_step, data, model, optimizer, *args, **kwargs)

        name = "check_param_hashes_across_dp_replicas"
        if hasattr(loop, name):
            check = getattr(loop, name)
            yield Patch(loop, name, lambda model, **kwargs: check([PlainValues(chunk) for chunk in model], **kwargs))
        name = "calc_params_l2_norm"
        if hasattr(loop, name):
            yield Patch(loop, name, including_cpu_masters(getattr(loop, name)))
        yield Patch(arguments, "add_megatron_arguments", lambda parser: add_arguments(add(parser)))
        yield Patch(loop, "setup_model_and_optimizer", set_up)
        yield Patch(checkpointing, "generate_state_dict", plain_state_dict)
        yield Patch(loop, "train_step", checked_step)

    def install(self) -> None:
        """Replace the functions of Megatron, until `uninstall`."""
        with Patches() as patches, host.known_api():
            patches.apply(self.patches())
            self._patches = patches.pop_all()

    def uninstall(self) -> None:
        """Give megatron.training its functions back, and detach all attachments.

        Collective where gathers overlap, as `Attachment.detach`.
        """
        global _installed  # noqa: PLW0603
        self._patches.close()
        _installed = None
        for attachment in self.attachments:
            attachment.detach()
        self._attachments.clear()

    def _set_up(self, original: Callable[[], Any]) -> Any:
        """Call Megatron's own setup of model, optimizer and schedule inside `quantized_params()`,
        with the patches that quantize and attach. Returns its result. Collective over all ranks.

        Raises RuntimeError if the setup has called none of the patched functions.
        """
        options = training().get_args()
        recipe, verify_every = self._chosen(options)
        if recipe is None:
            built = original()
        else:
            called: set[str] = set()
            with contextlib.ExitStack() as construction, Patches() as patches:
                construction.enter_context(quantized_params())
                with host.known_api():
                    patches.apply(self._building(recipe, verify_every, options, construction, called))
                built = original()
            # A Megatron version with a different API might have called none of the functions that
            # quantize and attach, and would then train plain weights.
            missing = [name for name in _CALLED_BY_SETUP if name not in called]
            if missing and not options.skip_train:
                raise RuntimeError(
                    f"{host.TRAINING}.setup_model_and_optimizer has not called {', '.join(missing)}: {host.UNKNOWN}"
                )
        optimizer = built[1]
        if optimizer is not None:
            self._optimizers.add(optimizer)
        return built

    def _chosen(self, options: Any) -> tuple[Recipe | None, int | None]:
        """Return (recipe or None, verify_every), from `install` or from the command line.

        Collective: an error, or a difference between ranks, raises on all of them.
        """
        recipe, problem = self._recipe, None
        verify_every = self._verify_every
        if verify_every is None:
            verify_every = getattr(options, "zerocast_verify_every", None)
        entries = getattr(options, "zerocast_recipe", None)
        try:
            if recipe is not None and entries is not None:
                raise ValueError(
                    f"install() was given a recipe, and the command line a different one by {FLAG}: pass one of them"
                )
            if entries is not None:
                recipe = Recipe.parse(entries, FLAG) if entries else Recipe({})
            validate.check_verify_every(verify_every)
            if recipe is not None:
                validate.check_options(options)
        except ValueError as error:
            problem = error
        settings = {"recipe": recipe, "verify_every": verify_every}
        validate_across_ranks(Group.of(None), [], problem, "sets up a model for Megatron", settings)
        return recipe, verify_every

    def _building(
        self,
        recipe: Recipe,
        verify_every: int | None,
        options: Any,
        construction: contextlib.ExitStack,
        called: set[str],
    ) -> Iterator[Patch]:
        """Yield patches of the functions that setup_model_and_optimizer calls, in the order of its
        calls. Each patched function adds its name to `called`.
        """
        loop, unwrap = training(), host.module(host.CORE).unwrap_model

        def before_wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
            def quantize(chunks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
                called.add("correct_amax_history_if_needed")
                result = original(chunks, *args, **kwargs)
                # With `--skip-train` the model is not wrapped and has no byte buffers. It loads the
                # checkpoint's plain values, which equal the values of the quantized weights.
                if not options.skip_train:
                    quantize_chunks([unwrap(chunk) for chunk in chunks], recipe)
                return result

            return quantize

        def build_optimizer(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
            called.add("get_megatron_optimizer")
            optimizer = original_factory(config, model_chunks, *args, **kwargs)
            # `attach` comes after `quantized_params()`, and before the checkpoint is loaded.
            construction.close()
            self._attachments.append(weakref.ref(attach(optimizer, model_chunks, verify_every)))
            return optimizer

        def load(*args: Any, **kwargs: Any) -> Any:
            # If a checkpoint is loaded without its optimizer, Megatron reads the masters from the
            # state dict then, and not from the model, whose values are rounded to a format.
            with replaced(options, "load_main_params_from_ckpt", True):
                return original_load(*args, **kwargs)

        if validate.is_by_layer(options):
            yield from layout.whole_matrices(model_builders())
        for module in model_builders():
            name = "correct_amax_history_if_needed"
            yield Patch(module, name, before_wrapping(getattr(module, name)))
        original_factory, original_load = loop.get_megatron_optimizer, loop.load_checkpoint
        yield Patch(loop, "get_megatron_optimizer", build_optimizer)
        yield Patch(loop, "load_checkpoint", load)


class PlainValues:
    """A view of a chunk with dequantized weights, for Megatron's comparison of parameter hashes."""

    def __init__(self, chunk: nn.Module) -> None:
        self._chunk = chunk

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield names and plain tensors, with the attribute by which Megatron recognizes
        experts.
        """
        for name, param in self._chunk.named_parameters():
            if is_primary(param):
                value: Any = weight_of(param).dequantize()
                value.allreduce = getattr(param, "allreduce", True)
                yield name, value
            else:
                yield name, param


def install(recipe: RecipeLike | None = None, verify_every: int | None = None) -> Installation:
    """Let `pretrain()` of megatron.training train quantized weights. Call it before, on every rank.

    The model that `pretrain` builds is quantized by `recipe`, a mapping of patterns to formats,
    before it is wrapped in DistributedDataParallel; its optimizer is attached, then a checkpoint is
    loaded. Checkpoints hold plain values of the nominal dtype, and the FP32 masters. Patterns match
    the names of Megatron's checkpoints: layers are counted through all pipeline stages, from 0. An
    empty recipe quantizes nothing and casts the weights of TransformerEngine's layers
    (`--fp8-param-gather`). Without an argument the recipe is that of the flag `--zerocast-recipe`
    (`add_arguments`); without that flag Megatron trains as it is. `verify_every` is passed to
    `attach`. With `--skip-train` nothing is quantized: the checkpoint's values equal the values of
    its quantized weights.

    Raises ValueError for a fast recipe, RuntimeError if this is installed already, and for a
    megatron.training without a name that is needed. `pretrain` then raises, on every rank if on
    any: ValueError for a recipe that differs between ranks, a pattern that matches no weight of any
    stage, a model without any quantized weight and settings that are not supported; RuntimeError
    for a megatron.training that builds models in a different way, and at the first step of a model
    that was built before this call.
    """
    global _installed  # noqa: PLW0603
    if _installed is not None:
        raise RuntimeError("zerocast is installed in megatron.training already: call uninstall() first")
    validate.check_verify_every(verify_every)
    chosen = None if recipe is None else Recipe.of(recipe)
    if chosen is not None and chosen.fast:
        raise ValueError(
            "Megatron compiles its layers by itself: leave out fast=True, and call zerocast.gemm.use(weight_gradients='fp8')"
        )
    installation = Installation(chosen, verify_every)
    installation.install()
    _installed = installation
    return installation


def uninstall() -> None:
    """Undo `install`, and detach the attached optimizers. Does nothing if nothing is installed."""
    if _installed is not None:
        _installed.uninstall()


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--zerocast-recipe '*.linear_*.weight=nvfp4' ...`: an `extra_args_provider` of Megatron.

    Also adds `--zerocast-verify-every N`, the `verify_every` of `attach`, and calls `install`
    unless that was called. So a script that reads the recipe from its command line needs no other
    line, and a script that calls `install` need not call this.
    """
    if FLAG not in parser._option_string_actions:
        group = parser.add_argument_group("zerocast")
        about = "formats of weights by their names; without any, only primary weights of TransformerEngine are cast"
        group.add_argument(FLAG, nargs="*", metavar="PATTERN=FORMAT", help=about)
        group.add_argument("--zerocast-verify-every", type=int, metavar="STEPS", help="compare all live bytes so often")
    if _installed is None:
        install()
    return parser


def quantize_chunks(chunks: Sequence[nn.Module], recipe: Recipe) -> None:
    """Quantize the unwrapped chunks of this rank's stage. Collective over all ranks.

    Raises ValueError on every rank if a pattern matches no weight of any rank, if no rank has a
    quantized weight, if `quantize_` raises on one rank, and for a tensor of TransformerEngine that
    cannot be cast in a byte buffer.
    """
    world, named = Group.of(None), [_global_names(chunk) for chunk in chunks]
    everything = [name for names in named for name in names.values()]
    matched = largest_of_ranks(world, [*recipe.used(everything), 0], "which patterns of the recipe match")
    problem: Exception | None = None
    try:
        if not all(matched[:-1]):
            recipe.check_used(everything)
        for chunk, names in zip(chunks, named, strict=True):
            formats = {name: recipe.format_of(known) for name, known in names.items()}
            validate.check_layers(chunk, {name for name, fmt in formats.items() if fmt.element is not None})
            validate.check_grouped(chunk)
            validate.check_te_tensors(chunk.named_parameters())
            quantize_(chunk, Recipe(formats, share_amax=recipe.share_amax))
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error
    validate_across_ranks(world, [], problem, "quantizes a model for Megatron")
    count = sum(is_primary(param) for chunk in chunks for param in chunk.parameters())
    if not largest_of_ranks(world, [count], "how many weights are quantized")[0]:
        raise ValueError(
            f"{recipe} quantizes no weight of the model, and it has none of TransformerEngine's (--fp8-param-gather): "
            "name weights in the recipe, or do without install()"
        )


def _global_names(chunk: nn.Module) -> dict[str, str]:
    """Return a dict from the local name of each weight of a chunk to its global name.

    In a global name layers count through all pipeline stages, from 0.
    """
    # The global prefix of each layer by its local prefix. Megatron's `layer_number` counts from 1.
    numbers = {
        f"{name}.{child}.": f"{name}.{number - 1}."
        for name, module in chunk.named_modules()
        if isinstance(module, nn.ModuleList)
        for child, layer in module.named_children()
        if isinstance(number := getattr(layer, "layer_number", None), int)
    }
    names = {}
    for name in (name for name, param in chunk.named_parameters() if param.dim() >= 2):
        prefix = next((prefix for prefix in numbers if name.startswith(prefix)), "")
        # Without a prefix, a weight outside all layers keeps its name.
        names[name] = numbers.get(prefix, "") + name.removeprefix(prefix)
    return names
