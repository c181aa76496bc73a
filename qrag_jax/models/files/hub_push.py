"""Pushes a folder to the hub with huggingface_hub.

The token is the one of the environment (HF_TOKEN) or of the hub's own login. It is never asked for,
stored or printed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.models.files.model_folder import HUB_NAME


@dataclasses.dataclass(frozen=True)
class HubTarget:
    """A repository of models on the hub, to which this machine may write.

    Attributes:
        name: "owner/name".
        private: whether only its owner may see it.
        api: the hub's client.
        token: opens the hub; kept out of every message and of `repr`.
    """

    name: str
    private: bool
    api: Any = dataclasses.field(repr=False)
    token: str = dataclasses.field(repr=False)

    @classmethod
    def of(cls, name: str, *, private: bool) -> HubTarget:
        """Checks all that can be checked without the hub, before any work is done.

        Args:
            name: "owner/name".
            private: whether a new repository is private.

        Raises:
            InputError: the name is none of a repository, huggingface_hub is not installed, or there
                is no token.
        """
        try:
            import huggingface_hub
            from huggingface_hub.utils import HFValidationError, validate_repo_id
        except ImportError:
            raise InputError(
                f"--push={name} needs huggingface_hub, which is not installed; pip install "
                "qrag_jax[hub], or leave --push out."
            ) from None
        try:
            validate_repo_id(name)
            fits = HUB_NAME.fullmatch(name) is not None
        except HFValidationError:
            fits = False
        if not fits:
            raise InputError(
                f"--push={name} is not the name of a repository; give OWNER/NAME of letters, "
                "digits, '-', '_' and '.', at most 96 characters."
            )
        token = huggingface_hub.get_token()
        if not token:
            raise InputError(
                f"--push={name} needs a token that may write there; set HF_TOKEN, or log in with "
                "`hf auth login`."
            )
        return cls(name, private, huggingface_hub.HfApi(token=token), token)

    def push(self, folder: Path, message: str) -> str:
        """Uploads every file of a folder in one commit, into a repository made if there is none.

        Args:
            folder: replaces folders and files of the same names; others stay.
            message: of the commit.

        Returns:
            The address of the repository.

        Raises:
            InputError: the hub cannot be reached or refuses, or the repository is public where a
                private one is asked for; nothing is uploaded then.
        """
        try:
            # None: as the owner's account has it.
            made = self.api.create_repo(self.name, private=self.private or None, exist_ok=True)
            public = self.private and not self.api.model_info(self.name).private
            if not public:
                self.api.upload_folder(
                    repo_id=self.name,
                    folder_path=folder,
                    commit_message=message,
                    # Weights of an older export beside the new ones might be read in their place.
                    delete_patterns=[
                        f"{path.name}/*" for path in folder.iterdir() if path.is_dir()
                    ],
                )
        except Exception as error:  # the client's many errors share no base class
            raise InputError(
                f"--push={self.name}: the hub did not take {folder} ({self._told(error)}); the "
                f"folder is whole, so push it later with `hf upload {self.name} {folder}`."
            ) from None
        if public:
            raise InputError(
                f"--push={self.name}: the repository is public already, but --private is given; "
                "make it private on the hub, give another name, or leave --private out."
            )
        return str(made)

    def _told(self, error: Exception) -> str:
        """The error's first line without the token, which a client may quote from a header."""
        line = next(filter(None, map(str.strip, str(error).splitlines())), "")
        text = f"{type(error).__name__}: {line}".removesuffix(": ")
        return text.replace(self.token, "…")[:300]
