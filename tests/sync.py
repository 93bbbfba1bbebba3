"""Copies a changed shared definition from the script it was changed in to all others: make sync.

A definition has changed where its text is not that of the last commit. It is copied to the scripts
that have one of the same name, but for those that the list of tests/test_scripts.py allows to
differ. Two different changes of one definition are an error. A script that the last commit doesn't
have gets what has changed in others; its own text is not copied.
"""

import subprocess
import sys

from test_scripts import DIFFERENT, ROOT, definitions, find_scripts, spans


def committed(path):
    """The definitions of a script in the last commit, {} if it is a new one."""
    command = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    git = subprocess.run(command, capture_output=True, text=True)
    return definitions(git.stdout)


def replace(text, name, source):
    """The text with another source for one of its definitions."""
    lines = text.splitlines()
    first, last = spans(text)[name]
    return "\n".join([*lines[: first - 1], *source.splitlines(), *lines[last:]]) + "\n"


def main(root):
    texts = {path: path.read_text() for path in find_scripts(root)}
    changed = {}
    for path, text in texts.items():
        old = committed(path)
        for name, source in definitions(text).items():
            if name not in DIFFERENT and source != old.get(name, source):
                changed.setdefault(name, {}).setdefault(source, path)
    for name, sources in changed.items():
        if len(sources) > 1:
            places = " and ".join(path.name for path in sources.values())
            sys.exit(f"error: {name} has changed in {places}: make it the same")
        ((source, origin),) = sources.items()
        for path, text in texts.items():
            if definitions(text).get(name, source) != source:
                texts[path] = replace(text, name, source)
                print(f"{name}: {origin.name} -> {path.name}")
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main(ROOT)
