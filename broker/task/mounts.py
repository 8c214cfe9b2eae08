"""`workdir` and `file_mounts`: local paths, buckets and git repositories."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from broker.task.allowed import GIT_URL
from broker.task.checking import check_bucket
from broker.task.expansion import find_variables
from broker.task.fields_storage import BUCKET_SCHEMES
from broker.task.reading import Reader, describe
from broker.task.tables import Section
from broker.task.yaml_reader import Marked
from broker.types import Repository, Resources, StorageMount

# Storage that nodes support (`storage/mounts.py`), as a URL or as the store of a named bucket.
SERVED_SCHEMES = ("s3://", "gs://", "gcs://", "az://", "r2://", "file://")
SERVED_STORES = ("s3", "gcs", "azure", "r2")
_URL_STORES = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "r2": "r2"}  # scheme -> the store of its buckets
_STORES = {"aws": "s3", "gcp": "gcs", "azure": "azure"}  # cloud -> the store of its own buckets
_FETCH = "use a local path, or download the data in `setup`"
_NAME = "write `name: MY-BUCKET` and `store: s3` (or gcs, azure, r2), or `source: s3://...`"
_HUB = "download models and data sets in `setup`, for example with `hf download`"
_DECLARE = "declare it under `envs`, with a value or with `--env`"
_HOME = "for the home folder, write `~/`"
WORKDIR = "sky_workdir"  # of every node, in its home folder
_FILL_IN = "give its variable a value with `--env`"
_FROM_HERE = "paths are relative to the current folder"


def read_workdir(reader: Reader, section: Section) -> str | Repository | None:
    """Return the local folder, or the repository. A missing folder prevents the launch."""
    value = section.get("workdir")
    if isinstance(value, Section):
        return Repository(url=value.get("url", ""), ref=value.get("ref"))
    if value is None:
        return None
    place = section.find_key("workdir")
    folder: str = value
    if variables := find_variables(folder):
        for name in _list_undeclared(variables, section):
            message = f"`workdir`: `{name}` is not in `envs`"
            reader.warn(place, "workdir", message, _suggest_value(name), blocks_launch=True)
    elif not _exists(folder, is_folder=True):
        hint = f"for a git repository, write `workdir: {{url: {folder}}}`" if GIT_URL.admits(folder) else _FROM_HERE
        reader.warn(place, "workdir", f"`workdir` is not a folder: `{folder}`", hint, blocks_launch=True)
    return folder


def read_file_mounts(
    reader: Reader, section: Section, resources: Sequence[Resources]
) -> tuple[dict[str, str], tuple[StorageMount, ...]]:
    """Return target -> local source, and the buckets, with targets as `locate_target` returns them.

    Without `store`, a bucket is in the cloud of all `resources`.
    """
    mounts: dict[str, str] = {}
    clouds = {each.cloud for each in resources}
    own_store = _STORES.get(clouds.pop() or "") if len(clouds) == 1 else None
    storage: list[StorageMount] = []
    for target, value in section.get("file_mounts", {}).items():
        source = section.marks["file_mounts"].value[target]
        if isinstance(value, Section):
            storage.append(_read_storage(reader, locate_target(target), value, own_store))
            texts = (*storage[-1].source, storage[-1].name or "")
            for name in _list_undeclared([name for text in texts for name in find_variables(text)], section):
                _warn(reader, value.marked, f"`file_mounts`: `{name}` is not in `envs`", _suggest_value(name))
        elif value.startswith(BUCKET_SCHEMES):
            origin = reader.find_origin(source)
            storage.append(StorageMount(target=locate_target(target), source=(value,), mode="COPY", origin=origin))
            if not value.startswith(SERVED_SCHEMES):
                message = f"`file_mounts`: `{value.partition('/')[0]}//` URLs are not supported"
                _warn(reader, source, message, _suggest_azure(value) or _FETCH)
            elif _lacks_bucket(value):
                _warn(reader, source, f"`file_mounts`: `{value}` names no bucket", "for example `s3://BUCKET/FOLDER`")
        else:
            mounts[locate_target(target)] = value
            if "://" in value:
                message = f"`file_mounts`: unknown kind of URL `{value.partition('://')[0][:40]}://`"
                _warn(reader, source, message, f"buckets begin with {', '.join(SERVED_SCHEMES[:-1])}")
            elif variables := find_variables(value):
                for name in _list_undeclared(variables, section):
                    _warn(reader, source, f"`file_mounts`: `{name}` is not in `envs`", _suggest_value(name))
            elif not value:
                _warn(reader, source, f"`file_mounts`: the source of `{target}` is empty", _FILL_IN)
            elif not _exists(value, is_folder=False):
                _warn(reader, source, f"`file_mounts` names a path that does not exist: `{value}`", _FROM_HERE)
    _check_targets(reader, section, {each.target for each in storage if each.mode.upper() != "COPY"})
    return mounts, tuple(storage)


def _check_targets(reader: Reader, section: Section, mounted: Collection[str]) -> None:
    """Report targets that are the same path, those that `mounted` buckets hide, and undeclared variables in them."""
    targets = section.get("file_mounts", {})
    places = section.marks["file_mounts"].keys if targets else {}
    known: dict[str, str] = {}  # path -> target
    for target in targets:
        path = _normalise(target)
        for name in _list_undeclared(find_variables(target), section):
            message = f"`file_mounts`: `{name}` is not in `envs`"
            reader.warn(places[target], "file_mounts", message, _suggest_value(name), blocks_launch=True)
        if path in known:
            message = f"`{target}` is the same path as `{known[path]}` in line {places[known[path]][0]}"
            reader.note(*places[target], message, "keep one of them")
        elif path in (".", WORKDIR) and locate_target(target) in mounted:
            hidden = "`workdir`" if path == WORKDIR else "what the node keeps there"
            folder = "working directory" if path == WORKDIR else "home folder"
            hint = f"mount it at a folder below it, for example `{target.rstrip('/')}/data`"
            if path == "." or section.get("workdir") is not None:
                reader.note(*places[target], f"a bucket mounted at the {folder} hides {hidden}", hint)
        known.setdefault(path, target)
    # Local files are copied before all buckets, which are mounted in the order of the file.
    steps = {path: (_is_bucket(targets[target]), number) for number, (path, target) in enumerate(known.items())}
    for path, target in known.items():
        for parent in map(str, PurePosixPath(path).parents):
            if parent in known and locate_target(known[parent]) in mounted and steps[parent] > steps[path]:
                message = f"`file_mounts`: the bucket mounted later at `{known[parent]}` hides `{target}`"
                hint = f"write it below `{known[parent]}`" if steps[path][0] else "choose a target outside of it"
                reader.warn(places[target], "file_mounts", message, hint, blocks_launch=True)


def _is_bucket(value: str | Section) -> bool:
    return isinstance(value, Section) or value.startswith(BUCKET_SCHEMES)


def locate_target(target: str) -> str:
    """Return a target as an absolute path, or one that begins with `~/`: a relative one is in the working directory.

    As in SkyPilot: `data` is `~/sky_workdir/data`, so that `run` finds it as `data`.
    """
    if target == "~":
        return "~/"
    return target if target.startswith(("/", "~")) else f"~/{WORKDIR}/{posixpath.normpath(target)}"


def _normalise(target: str) -> str:
    """Return the path of a target on the node, relative to the home folder unless it is absolute."""
    return posixpath.normpath(locate_target(target).removeprefix("~/") or ".")


def _read_storage(reader: Reader, target: str, section: Section, own_store: str | None) -> StorageMount:
    value = section.get("source", ())
    sources = (value,) if isinstance(value, str) else tuple(value)
    store, name = section.get("store"), section.get("name")
    if store is None and name and not any("://" in each for each in sources):
        store = own_store
    if fault := check_bucket(name or "", store):
        rule, hint = fault
        reader.fault(section.marks["name"], f"`name` must be {rule.expected}, not {describe(name)}", hint)
    if "" in sources or (not name and not sources):  # as a path, "" would be the current folder
        is_empty = section.get("name") is not None or section.get("source") is not None
        message = "the `name` or `source` of a storage is empty" if is_empty else "storage requires `name` or `source`"
        hint = _FILL_IN if is_empty else "write `source: s3://...`"
        _warn(reader, section.marked, f"`file_mounts`: {message}", hint)
    elif store == "volume":
        _warn(reader, section.marked, "`file_mounts`: volumes are not supported", "use `disk_size`, or a bucket")
    else:
        if name and store is None and not any("://" in each for each in sources):
            hint = f"add `store: s3` (or {', '.join(SERVED_STORES[1:])}): the task may run on several clouds"
            _warn(reader, section.marked, f"`file_mounts`: the bucket `{name}` has no `store`", hint)
        elif not _is_served(sources, name, store):
            is_hub = store == "hf" or any(each.startswith("hf://") for each in sources)
            message = f"`file_mounts`: {_describe_unserved(sources, name, store)}"
            _warn(reader, section.marked, message, _HUB if is_hub else _suggest_azure("".join(sources)) or _NAME)
        elif sources and store not in (None, _find_store(sources[0], store)):
            # SkyPilot copies it to a new bucket of that store and mounts the copy.
            message = f"`file_mounts`: copying `{sources[0]}` to a bucket in `{store}` is not supported"
            _warn(reader, section.marked, message, "remove `store` to use the bucket where it is")
        elif sources and "://" in sources[0] and _lacks_bucket(sources[0]):
            _warn(reader, section.marked, f"`file_mounts`: `{sources[0]}` names no bucket", _FILL_IN)
        for each in sources:
            if "://" not in each and not find_variables(each) and not _exists(each, is_folder=False):
                _warn(reader, section.marked, f"`file_mounts` names a path that does not exist: `{each}`", _FROM_HERE)
        if section.get("persistent") is False:
            place = (section.marked.line, section.marked.column)
            hint = "delete it yourself when you no longer need it"
            reader.warn(place, "file_mounts", "`persistent: false`: the bucket is kept", hint, blocks_launch=False)
    return StorageMount(
        target=target,
        source=sources,
        name=name,
        store=store,
        mode=section.get("mode", "MOUNT"),
        is_read_only=_is_read_only(section),
        origin=reader.find_origin(section.marked),
    )


def _describe_unserved(sources: tuple[str, ...], name: str | None, store: str | None) -> str:
    if len(sources) > 1 and any("://" in each for each in sources):
        return "several sources are supported only for local paths"
    if sources and "://" in sources[0]:
        return f"`{sources[0].partition('://')[0][:40]}://` URLs are not supported"
    return f"the store `{store}` is not supported" if name else "a local `source` requires the `name` of a bucket"


def _suggest_azure(url: str) -> str | None:
    """Return a hint for SkyPilot's URL of an Azure container."""
    found = re.fullmatch(r"https://([\w-]+)\.blob\.core\.windows\.net/(\S+)", url)
    return (
        f"write `az://{found[2]}`, and set AZURE_STORAGE_ACCOUNT_NAME={found[1]} where broker runs" if found else None
    )


def _find_store(source: str, default: str) -> str:
    """Return the store of a bucket's URL; the default for a local path."""
    return _URL_STORES.get(source.partition("://")[0], default) if "://" in source else default


def _lacks_bucket(url: str) -> bool:
    scheme, _, rest = url.partition("://")
    return scheme != "file" and not rest.partition("/")[0]


def _suggest_value(variable: str) -> str:
    return _HOME if variable == "HOME" else _DECLARE


def _list_undeclared(variables: Sequence[str], section: Section) -> list[str]:
    """Return the variables that the task does not declare; the others have a note that they have no value."""
    return [name for name in variables if name not in {*section.get("envs", {}), *section.get("secrets", {})}]


def _is_read_only(section: Section) -> bool:
    """Return whether the options of the mount's mode forbid writes; without the option, the kind of data decides."""
    config: Section | None = section.get("config")
    options: Section | None = config.get(section.get("mode", "MOUNT").lower()) if config else None
    given: bool | None = options.get("read_only") if options else None
    return section.get("type", "").endswith("_RO") if given is None else given


def _is_served(sources: tuple[str, ...], name: str | None, store: str | None) -> bool:
    """Return whether the bucket is supported.

    It is supported if it exists, or if it is named, created when missing, and filled by uploads from `source`.
    """
    if any("://" in source for source in sources):
        return len(sources) == 1 and sources[0].startswith(SERVED_SCHEMES)
    return bool(name) and (store or "").lower() in SERVED_STORES


def _warn(reader: Reader, marked: Marked, message: str, hint: str) -> None:
    reader.warn((marked.line, marked.column), "file_mounts", message, hint, blocks_launch=True)


def _exists(path: str, *, is_folder: bool) -> bool:
    try:
        local = Path(path).expanduser()
        return local.is_dir() if is_folder else local.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown user after `~`, a zero byte
        return False
