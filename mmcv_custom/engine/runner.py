"""The runner that registers the communication hook of the config."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.model import is_model_wrapper, revert_sync_batchnorm
from mmengine.optim import OptimWrapper
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from torch import nn

from ..files import without_trust
from .changed_weights import forget_changed
from .complete_weights import is_test, must_fill
from .configured_hook import configured_hook
from .cpu_group import init_cpu_group
from .ddp_wrapper import attach_comm_hook
from .effective_batch_size import log_effective_batch_size
from .hook_state import restore_from_checkpoint, save_beside_checkpoint
from .hooks import CompressionHook, StateFoldersHook, WrappedModelHook
from .hooks.exchange_cost import ExchangeCostHook, wants_stats
from .incompatible_options import (
    refuse_accumulated_static_graph,
    refuse_several_loss_scales,
)
from .machines import lost_machine
from .resumed_settings import overruled_settings, schedule_settings
from .sharded import gathered_on_rank_0, refuse_overlap
from .spec import CommHook
from .state_folders import StateFolders, local_folder
from .weight_options import check_weight_options
from .wrapper_options import takes_hook, wrapper_class, wrapper_options

__all__ = ['CommHookRunner']

# The env_cfg that MMEngine's Runner gets where none is configured.
_DEFAULT_ENV_CFG = {'dist_cfg': {'backend': 'nccl'}}


@RUNNERS.register_module()
class CommHookRunner(Runner):
    """MMEngine's runner with a choice of the gradient exchange.

    The config key ``ddp_comm_hook`` (see
    :func:`mmcv_custom.engine.normalize_comm_hook`) names the communication
    hook that is registered when the model is wrapped. Runs that exchange no
    gradients, as tests and single processes, ignore it with a log line.

    Without an accelerator the runner starts gloo, and SyncBN becomes BN.

    Raises:
        TypeError, ValueError: If ``ddp_comm_hook`` or the backend is wrong,
            before data or model are built.
        RuntimeError: If the model's wrapper has a hook already.
    """

    comm_hook: CommHook | None = None
    _resumes_optimizer = False  # while a checkpoint is loaded

    def setup_env(self, env_cfg: dict) -> None:
        """Check the key and start the process group, before all else."""
        self._spec = configured_hook(self.cfg)
        self._logs_cost = wants_stats(self.cfg)
        # Built so early, as constructors check the knobs. What is built gets
        # its model and process group in wrap_model.
        self._unbound_hook = self._spec and self._spec.build()
        refuse_overlap(self.optim_wrapper)
        if self.distributed and not is_distributed() and _on_cpu():
            dist_cfg = env_cfg.get('dist_cfg') or {}
            if 'env_cfg' not in self.cfg and env_cfg == _DEFAULT_ENV_CFG:
                dist_cfg = {}  # nobody asked for nccl
            init_cpu_group(self._launcher, **dist_cfg)
        super().setup_env(env_cfg)

    def wrap_model(
        self, model_wrapper_cfg: dict | None, model: nn.Module
    ) -> nn.Module:
        """Wrap the model as MMEngine does, and register the hook.

        Args:
            model_wrapper_cfg: As in MMEngine; its options win over the
                defaults here. It is not changed.
            model: The model. On CPU its SyncBN layers are replaced by BN.

        Returns:
            The wrapped model, or in a single process the model itself.
        """
        if self.distributed and not is_model_wrapper(model):
            options = wrapper_options(
                model_wrapper_cfg,
                self.cfg.get('find_unused_parameters', False),
                _on_cpu(),
            )
            with self._batch_norm_on_cpu(model) as model:
                if not _has_trained_parameter(model) and takes_hook(
                    wrapper_class(options)
                ):
                    # DDP refuses such a model. So does `train`, but a test
                    # of it can run without a wrapper.
                    return model.to(get_device())
                model = super().wrap_model(options, model)
        else:
            model = super().wrap_model(model_wrapper_cfg, model)
        if self.world_size > 1 and self._train_loop is not None:
            self.comm_hook = attach_comm_hook(model, self._unbound_hook)
        return model

    def register_hooks(self, *args, **kwargs) -> None:
        """Register MMEngine's hooks, and those of this package."""
        super().register_hooks(*args, **kwargs)
        self._state_folders = StateFolders(self.logger)
        self.register_hook(StateFoldersHook(self._state_folders))
        if is_model_wrapper(self.model):
            self.register_hook(WrappedModelHook(self.model))
        if self.comm_hook is not None and self.comm_hook.instance is not None:
            self.register_hook(CompressionHook(self.comm_hook))
        if (
            self._logs_cost
            and self.world_size > 1
            and self._train_loop is not None
            and takes_hook(type(self.model))
        ):
            self.register_hook(ExchangeCostHook(self.comm_hook))

    def build_optim_wrapper(self, *args, **kwargs) -> OptimWrapper:
        """Build as MMEngine does; refuse what cannot train this model."""
        optim_wrapper = super().build_optim_wrapper(*args, **kwargs)
        refuse_overlap(optim_wrapper)
        refuse_accumulated_static_graph(self.model, optim_wrapper)
        refuse_several_loss_scales(self.comm_hook, optim_wrapper)
        return optim_wrapper

    def scale_lr(self, *args, **kwargs) -> None:
        """Scale as MMEngine does, and say how many samples a step has."""
        log_effective_batch_size(self)
        super().scale_lr(*args, **kwargs)

    def save_checkpoint(
        self, out_dir: str, filename: str, *args, **kwargs
    ) -> None:
        """Save a checkpoint, and before it each rank's hook state.

        ``CheckpointHook`` calls this on all ranks. With an optimizer whose
        state is sharded, all have to.
        """
        save = super().save_checkpoint
        call = inspect.signature(save).bind(out_dir, filename, *args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        folder = local_folder(
            out_dir, options['file_client_args'], options['backend_args']
        )
        optim_wrapper = (
            self.optim_wrapper if options['save_optimizer'] else None
        )
        self._state_folders.follow()
        with gathered_on_rank_0(optim_wrapper, self.logger):
            save_beside_checkpoint(
                self, folder and folder / filename, options['meta']
            )
            save(*call.args, **call.kwargs)
        if folder is not None:
            self._state_folders.remove_orphans((folder / filename).parent)

    def load_checkpoint(self, filename: str, *args, **kwargs) -> dict:
        """Load as MMEngine does; for a test, the model must be complete."""
        if is_test(self):
            with must_fill(self.model, filename):
                return super().load_checkpoint(filename, *args, **kwargs)
        checkpoint = super().load_checkpoint(filename, *args, **kwargs)
        if self._resumes_optimizer:
            forget_changed(checkpoint, self.model, self.optim_wrapper)
        return checkpoint

    def resume(
        self,
        filename: str,
        resume_optimizer: bool = True,
        *args,
        **kwargs,
    ) -> None:
        """Resume from a checkpoint, and each rank's hook state with it."""
        settings = schedule_settings(self)
        self._resumes_optimizer = resume_optimizer
        try:
            super().resume(filename, resume_optimizer, *args, **kwargs)
        finally:
            self._resumes_optimizer = False
        for message in overruled_settings(self, settings):
            self.logger.warning(message)
        filename = without_trust(filename)
        restore_from_checkpoint(self, filename)
        self._state_folders.begin_with(filename)

    def train(self) -> nn.Module:
        """Train, after one log line that says how gradients are exchanged.

        Raises:
            ValueError: If all parameters are frozen, or the options of the
                optimizers or the wrapper exclude each other.
            FileNotFoundError: If a file of weights is not there.
        """
        check_weight_options(self, trains=True)
        if not _has_trained_parameter(self.model):
            raise ValueError(
                f'no parameter of the {self._model_name} requires a gradient, '
                'so there is nothing to train; unfreeze a part of it, or '
                'validate or test it'
            )
        if self.world_size == 1:
            self._log_ignored('a single process exchanges no gradients')
        elif takes_hook(type(self.model)):
            name = self.model._get_ddp_logging_data().get('comm_hook')
            self.logger.info(
                'Gradient exchange: '
                + (
                    f'communication hook {name}'
                    if name
                    else "DDP's own all-reduce, as ddp_comm_hook is not set"
                )
            )
        try:
            return super().train()
        except RuntimeError as error:
            lost = lost_machine(error)
            if lost is not None:
                self.logger.error(lost)
            raise
        finally:
            self._state_folders.release()

    def val(self) -> dict:
        """Validate; a configured hook is not used."""
        check_weight_options(self, trains=False)
        self._log_ignored('validation exchanges no gradients')
        return super().val()

    def test(self) -> dict:
        """Test; a configured hook is not used."""
        check_weight_options(self, trains=False)
        self._log_ignored('a test exchanges no gradients')
        return super().test()

    def _log_ignored(self, reason: str) -> None:
        if self._spec is not None:
            self.logger.info(
                f'ddp_comm_hook={self._unbound_hook.name!r} is not used: '
                f'{reason}'
            )

    @contextmanager
    def _batch_norm_on_cpu(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the model to wrap: on CPU, with BN in the place of SyncBN.

        Within it, MMEngine is kept from turning BN into SyncBN, as the key
        ``sync_bn`` would have it do.
        """
        if not _on_cpu():
            yield model
            return
        has_sync_bn = any(
            isinstance(m, nn.SyncBatchNorm) for m in model.modules()
        )
        sync_bn = self.cfg.pop('sync_bn', None)
        if has_sync_bn or sync_bn is not None:
            self.logger.info(
                'SyncBN works on GPU only and becomes BN: each process '
                'normalises with the statistics of its own batch'
            )
        try:
            yield revert_sync_batchnorm(model) if has_sync_bn else model
        finally:
            if sync_bn is not None:
                self.cfg.sync_bn = sync_bn


def _has_trained_parameter(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


def _on_cpu() -> bool:
    return get_device() == 'cpu'
