"""Files that are whole or not there: written under another name, flushed, renamed; and told apart from damaged ones."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from presage.errors import RunError


def write_bytes(path: Path, data: bytes) -> None:
    """Atomic: after a crash at any moment the path holds the old content or the new."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        flush_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}; make room or choose another folder.") from error


def flush_folder(folder: Path) -> None:
    """Make renames in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{path} is missing.") from None
    except ValueError:
        raise RunError(f"{path} is damaged: it is not valid JSON.") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it does not hold a JSON object.")
    return content


def encode_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    return save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, dict(metadata or {}))


def read_tensors(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file whose checksum is known; a file that differs is named and refused."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{path} is missing.") from None
    if checksum(data) != sha256:
        raise RunError(f"{path} is damaged: its SHA-256 is not the one recorded when it was written.")
    try:
        return load(data)
    except SafetensorError as error:
        raise RunError(f"{path} is damaged: {error}.") from None


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
