"""The README as a package index shows it: by itself, where a relative link leads nowhere.

Its links and pictures lead into the repository: the one that ``[project.urls] Source`` names, or
else the one that the clone was made from. Where neither is known, links become their text and
pictures are left out.
"""

import email
import pathlib
import re
import subprocess

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<path>[^)#]*)(?P<part>#[^)]*)?\)"
)
# https://host/owner/name.git, ssh://git@host/owner/name.git or git@host:owner/name.git. Who is
# named before the host, a token maybe, is no part of the page.
_REMOTE = re.compile(
    r"(?:https://(?:[^@/]*@)?|ssh://(?:[^@/]*@)?|[\w.-]+@)"
    r"(?P<host>[\w-]+(?:\.[\w-]+)+)(?::\d+/|[:/])(?P<path>[^:]+?)(?:\.git)?/?"
)


def absolute(text: str, source: str | None) -> str:
    """Markdown whose links and pictures lead into a repository at that address, or nowhere."""

    def lead(link: re.Match[str]) -> str:
        if source is None:
            return "" if link["image"] else link["text"]
        kind = "raw" if link["image"] else "blob"
        place = f"{source.rstrip('/')}/{kind}/main/{link['path']}{link['part'] or ''}"
        return f"{link['image']}[{link['text']}]({place})"

    return _LINK.sub(lead, text)


def address(remote: str) -> str | None:
    """The page of the repository at git's address of it; None for one on this machine."""
    found = _REMOTE.fullmatch(remote.strip())
    return found and f"https://{found['host']}/{found['path']}"


def origin(root: pathlib.Path) -> str | None:
    """The page of the repository that this clone was made from."""
    if not (root / ".git").exists():
        return None
    ask = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    try:
        return address(subprocess.run(ask, capture_output=True, text=True, check=False).stdout)
    except OSError:  # no git
        return None


class CustomMetadataHook(MetadataHookInterface):
    """Makes the README a page that stands by itself."""

    def update(self, metadata: dict) -> None:
        root = pathlib.Path(self.root)
        of_the_sdist = root / "PKG-INFO"
        if of_the_sdist.exists():
            text = email.message_from_string(of_the_sdist.read_text("utf-8")).get_payload()
        else:
            source = metadata.get("urls", {}).get("Source") or origin(root)
            text = absolute((root / "README.md").read_text("utf-8"), source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
