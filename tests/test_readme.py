"""The README keeps up with the project: its file tree, and the files and links it names."""

import re
import sys

from paths import PROJECT

sys.path.insert(0, str(PROJECT / "scripts"))
from file_tree import file_tree, with_tree

README = (PROJECT / "README.md").read_text(encoding="utf-8")


def test_the_file_tree_is_that_of_the_project():
    assert with_tree(README, file_tree()) == README, "run scripts/file_tree.py"


def test_every_picture_and_file_that_the_readme_names_exists():
    named = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(
        r"\b((?:examples|scripts|checkpoints|docs)/[\w./-]+\w)", README
    )
    assert len(named) > 5
    assert [name for name in named if not (PROJECT / name).exists()] == []
