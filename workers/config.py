"""The configuration of the workers and of the sandboxes on a node.

Stages and handlers get it with their job; `workers/sandboxes` gets it, or values of it, from its callers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from farm.settings import settings

if TYPE_CHECKING:
    from farm.settings import Settings


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """The settings of `farm.settings` that sandboxes depend on, and the folders on this node. Paths are absolute."""

    home: Path
    scratch: Path
    user: str
    """The name of the user that sandboxes run as when the farm is started by root."""
    ids: str
    cgroup: Path | None
    lifeline_fd: int | None
    warm_pool: int
    warm_pool_idle_s: float
    layer_idle_s: float
    image_cache: Literal["scratch", "versioned", "lock"]
    image_builder: Literal["own", "buildah"]
    build_network: bool
    build_env: Mapping[str, str] = field(hash=False, repr=False)
    build_files: Mapping[str, str] = field(hash=False)
    started_at: float | None

    @classmethod
    def of(cls, settings: Settings) -> SandboxConfig:
        return cls(
            home=settings.home.absolute(),
            scratch=settings.scratch.absolute(),
            user=settings.sandbox_user,
            ids=settings.sandbox_ids,
            cgroup=settings.cgroup,
            lifeline_fd=settings.lifeline_fd,
            warm_pool=settings.warm_pool,
            warm_pool_idle_s=settings.warm_pool_idle_s,
            layer_idle_s=settings.layer_idle_s,
            image_cache=settings.image_cache,
            image_builder=settings.image_builder,
            build_network=settings.build_network,
            build_env=settings.build_env,
            build_files=settings.build_files,
            started_at=settings.started_at,
        )

    @property
    def sandboxes_folder(self) -> Path:
        """The folder that contains the folders of all sandboxes."""
        return self.scratch / "sandboxes"

    @property
    def layers_folder(self) -> Path:
        return self.scratch / "layers"

    @property
    def used_folder(self) -> Path:
        """The folder with a record of each recent request for a sandbox, for the warm pool."""
        return self.scratch / "used"

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    @property
    def images_folder(self) -> Path:
        """The folder that has one folder for each image."""
        return self.cache / "images"

    @property
    def environments_folder(self) -> Path:
        return self.cache / "environments"

    @property
    def digests_folder(self) -> Path:
        """The folder of the remembered digests, one small file each."""
        return self.cache / "digests"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of `farm.settings` that stages and handlers depend on."""

    sandboxes: SandboxConfig
    swe_images: Mapping[str, str] = field(hash=False)

    @classmethod
    def of(cls, settings: Settings) -> WorkerConfig:
        return cls(SandboxConfig.of(settings), settings.swe_images)

    @property
    def archives_folder(self) -> Path:
        """The folder that has one folder for each unpacked task archive."""
        return self.sandboxes.scratch / "archives"


def own_config() -> WorkerConfig:
    """Return the configuration by the settings of this process."""
    return WorkerConfig.of(settings())
