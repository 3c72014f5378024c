"""The README as a package index shows it: with links that do not depend on where it stands."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<path>[^)#]*)(?P<part>#[^)]*)?\)"
)


def absolute(text: str, source: str) -> str:
    """Markdown whose links and pictures lead into a repository at that address."""

    def lead(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        place = f"{source.rstrip('/')}/{kind}/main/{link['path']}{link['part'] or ''}"
        return f"{link['image']}[{link['text']}]({place})"

    return _LINK.sub(lead, text)


class CustomMetadataHook(MetadataHookInterface):
    """Makes the README's links absolute where ``[project.urls]`` says what the ``Source`` is."""

    def update(self, metadata: dict) -> None:
        text = (pathlib.Path(self.root) / "README.md").read_text("utf-8")
        source = metadata.get("urls", {}).get("Source")
        text = absolute(text, source) if source else text
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
