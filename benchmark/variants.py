"""The names of variants: which runs a report counts as the same.

A variant is what a suite calls it, or else the script and the flags that differ from its defaults.
Runs with different flags, from different scripts of one name, or from the two sides of --compare
never share a variant's name.
"""

import re
import shlex
from collections import Counter, defaultdict
from pathlib import PurePosixPath

import pandas as pd

from benchmark.flags import NO_VARIANT, words_of


def changed_flags(args, defaults):
    """The flags that make a variant: those in args that differ from the defaults, a dict."""
    return {
        name: value
        for name, value in args.items()
        if name not in NO_VARIANT and (name not in defaults or value != defaults[name])
    }


def text_of(flags):
    """Flags -> words to read: 400.0 is 400, and of an absolute path only the last part is left."""
    return without_paths(shlex.join(words_of({x: plain(y) for x, y in flags.items()})))


def plain(value):
    """A flag's value with whole numbers in place of floats that are whole."""
    if isinstance(value, list):
        return [plain(x) for x in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def without_paths(text):
    """text with the absolute paths in it cut to their last part."""
    path = r"(?<![^\s'\"=(:,\[])(?:/[\w.@+-]+)+"
    return re.sub(path, lambda found: found[0].rsplit("/", 1)[1], text)


def name_variants(runs):
    """Names the variants of runs -> (runs, notes).

    runs: a frame as benchmark.runs has it; notes: sentences about flags that the names don't show.
    Runs of a CSV have their names already, and only get what tells them from other runs here.

    The order matters. A script's runs are named first, since the rest looks for names that are the
    same. Flags that tell them apart come before steps, which are only compared within a variant.
    The notes give the names without marks, which come last: up to then, a run has the same name on
    both sides of --compare.
    """
    rows = runs.to_dict("records")
    from_folders = [row for row in rows if not row["from_csv"]]
    for script in sorted({row["script"] for row in from_folders}):
        name_script([row for row in from_folders if row["script"] == script])
    tell_apart(rows)
    add_steps(rows)
    notes = notes_of(rows)
    add_marks(rows)
    named = pd.DataFrame(rows, columns=runs.columns, index=runs.index)
    return named.astype(runs.dtypes), notes


def name_script(rows):
    """Names the runs of one script that were read from folders."""
    own = own_flags(rows)
    several = any(flags != own[0] for flags in own)
    shared = common(own) if several else {}  # the only variant is named in full
    for row, flags, origin in zip(rows, own, origins_of(rows), strict=True):
        rest = {name: value for name, value in flags.items() if name not in shared}
        words = text_of(rest)
        shown = row["suite_variant"] or words
        row["flags"] = text_of(flags)
        row["shared"] = text_of(shared)
        row["hidden"] = words if row["suite_variant"] else ""
        row["base"] = not rest
        row["family"] = row["script"] + origin
        row["variant"] = f"{row['script']} {shown}".rstrip() + origin


def own_flags(rows):
    """The flags of each of a script's runs that differ from its defaults, a list of dicts.

    A run that doesn't know its defaults gets those of another run, rather of a script in the same
    folder. If no run knows them, the flags that all runs share count as defaults.
    """
    by_place = {}
    for row in rows:
        if row["defaults"]:
            by_place.setdefault(row["script_folder"], row["defaults"])
    usual = common([row["args"] for row in rows if row["args"]])
    if by_place:
        usual = next(iter(by_place.values()))
    found = []
    for row in rows:
        defaults = row["defaults"] or by_place.get(row["script_folder"], usual)
        found.append(changed_flags(row["args"] or {}, defaults))
    return found


def common(dicts):
    """The items that several dicts share, a dict."""
    if not dicts:
        return {}
    first, *others = dicts
    return {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }


def notes_of(rows):
    """Sentences about flags that the names of variants don't show."""
    notes = []
    for script in sorted({row["script"] for row in rows}):
        own = [row for row in rows if row["script"] == script]
        shared = defaultdict(set)
        hidden = {}
        for row in own:
            shared[row["shared"]].add(row["variant"])
            hidden[row["variant"]] = row["hidden"]
        for words, variants in sorted(shared.items()):
            who = f"All variants of {script}" if len(shared) == 1 else ", ".join(sorted(variants))
            if words:
                notes.append(f"{who} have {words}.")
        told = [f"{variant} has {words}" for variant, words in sorted(hidden.items()) if words]
        if told:
            notes.append(f"{'; '.join(told)}.")
    return notes


def origins_of(rows):
    """What tells scripts of one name apart: " (FOLDER)", " (COMMIT)" or both, for each run.

    It is "" if all runs have the same script. A run whose script isn't known, since it hasn't begun
    or kept no copy, counts as one of the most frequent script. Runs of --compare are only told
    apart from each other, since their mark tells them from the rest.
    """
    labels = {}
    for compared in (False, True):
        group = [row for row in rows if row["compared"] == compared]
        folders = fill_in([row["script_folder"] for row in group])
        names = distinct_ends(set(folders))
        for folder, name in names.items():
            inside = [row for row, other in zip(group, folders, strict=True) if other == folder]
            for row, label in zip(inside, hash_labels(inside), strict=True):
                parts = [name] if len(names) > 1 else []
                if label:
                    parts.append(label)
                labels[row["id"]] = f" ({', '.join(parts)})" if parts else ""
    return [labels[row["id"]] for row in rows]


def fill_in(values):
    """values with the most frequent of them in place of ""."""
    known = Counter(value for value in values if value)
    if not known:
        return values
    usual = known.most_common(1)[0][0]
    return [value or usual for value in values]


def distinct_ends(folders):
    """{folder: as many of its last parts as tell it from the others}."""
    parts = {folder: PurePosixPath(folder).parts for folder in folders}
    for count in range(1, 1 + max(map(len, parts.values()), default=0)):
        ends = {folder: "/".join(own[-count:]) for folder, own in parts.items()}
        if len(set(ends.values())) == len(folders):
            return ends
    return {folder: folder for folder in folders}


def hash_labels(rows):
    """A label for each run, which tells the texts of a script in one folder apart.

    It is "" if there is only one text. It is the git commit if each text has a commit of its own,
    else the text's hash.
    """
    commits = defaultdict(set)
    for row in rows:
        if row["script_hash"]:
            commits[row["script_hash"]].add(row["git_commit"])
    if len(commits) < 2:
        return [""] * len(rows)
    every = [commit for own in commits.values() for commit in own]
    by_commit = len(set(every)) == len(every) == len(commits) and "unknown" not in every
    hashes = fill_in([row["script_hash"] for row in rows])
    if by_commit:
        return [next(iter(commits[value])) for value in hashes]
    return [f"text {value}" for value in hashes]


def tell_apart(rows):
    """Adds what differs to the names of variants that share a name: the script's text, the flags.

    Names that come from CSVs may be those of others.
    """
    hashes = defaultdict(set)
    for row in rows:
        if row["script_hash"]:
            hashes[row["variant"], row["compared"]].add(row["script_hash"])
    for row in rows:
        if row["script_hash"] and len(hashes[row["variant"], row["compared"]]) > 1:
            for name in ("family", "variant"):
                row[name] += f" (text {row['script_hash']})"
    flags = defaultdict(set)
    for row in rows:
        flags[row["variant"], row["compared"]].add(row["flags"])
    for row in rows:
        if len(flags[row["variant"], row["compared"]]) > 1 and row["flags"]:
            row["base"] = False
            row["hidden"] = ""
            row["variant"] += f" {row['flags']}"


def add_steps(rows):
    """Adds the steps to the names of runs that don't have their variant's usual steps.

    The usual steps are those of most of its runs in the environment. Runs of --compare are held
    to the usual steps of the other runs.
    """
    lengths = defaultdict(Counter)
    for compared in (False, True):
        known = set(lengths)
        for row in rows:
            key = row["env_id"], row["variant"]
            does_count = row["compared"] == compared and key not in known
            if does_count and row["planned_steps"] > 0:
                lengths[key][row["planned_steps"]] += 1
    for row in rows:
        if not row["planned_steps"] > 0:  # unknown, too
            continue
        usual = lengths[row["env_id"], row["variant"]].most_common(2)
        is_tie = len(usual) == 2 and usual[0][1] == usual[1][1]
        if is_tie or row["planned_steps"] != usual[0][0]:
            row["base"] = False
            row["variant"] += f" --total-timesteps {row['planned_steps']:.0f}"


def add_marks(rows):
    """Marks the variants of runs of --compare.

    The mark is their git commit if they have a single one that no other run has, else "compared".
    """
    commits = {row["git_commit"] for row in rows if not row["compared"]}
    theirs = {row["git_commit"] for row in rows if row["compared"] and row["git_commit"]}
    word = "compared"
    if len(theirs) == 1 and not theirs & (commits | {"unknown"}):
        word = next(iter(theirs))
    for row in rows:
        if row["compared"]:
            for name in ("mark", "family", "variant"):
                row[name] += f" ({word})"


def unique_names(names):
    """names, of which those that are taken already get " (2)", " (3)" and so on."""
    made = []
    taken = set()
    for name in names:
        count = 1
        new = name
        while new in taken:
            count += 1
            new = f"{name} ({count})"
        taken.add(new)
        made.append(new)
    return made
