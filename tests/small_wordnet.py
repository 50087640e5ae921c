"""A made-up WordNet of a few dozen senses, in WordNet's own file format (wndb(5))."""

from pathlib import Path

NOUNS = ("oak", "fir", "elm", "rose", "tulip", "fern", "moss", "ivy")
PAIRS = (("open", "closed"), ("hot", "cold"), ("wet", "dry"))
FIELD_WORDS = ("serve", "racket", "umpire", "volley", "court", "lob")


def write_wordnet(folder: Path) -> Path:
    """Eight plants of the kind "plant", three pairs of opposites, six words of the field "tennis"."""
    folder.mkdir()
    plants = [
        f'{number:08} 20 n 01 {noun} 0 001 @ 00000100 n 0000 | a plant named {noun}; "the {noun} grows slowly"  '
        for number, noun in enumerate(NOUNS, 1)
    ]
    others = ["00000100 03 n 01 plant 0 000 | a living thing that grows  ", "00000101 04 n 01 tennis 0 000 | a game  "]
    words = [
        f"{number:08} 04 n 01 {word} 0 001 ;c 00000101 n 0000 | something in the game called {word}  "
        for number, word in enumerate(FIELD_WORDS, 200)
    ]
    (folder / "data.noun").write_text("  1 licence | text\n" + "\n".join([*plants, *others, *words]) + "\n")
    adjectives = []
    for number, pair in enumerate(PAIRS):
        for place in (0, 1):
            own, other = 300 + 2 * number + place, 300 + 2 * number + 1 - place
            adjectives.append(f"{own:08} 00 a 01 {pair[place]} 0 001 ! {other:08} a 0101 | being {pair[place]}  ")
    (folder / "data.adj").write_text("\n".join(adjectives) + "\n")
    for part in ("verb", "adv"):
        (folder / f"data.{part}").write_text("")
    counts = [f"{noun}%1:20:00:: 1 3" for noun in NOUNS] + [f"{w}%3:00:00:: 1 2" for pair in PAIRS for w in pair]
    (folder / "cntlist.rev").write_text("\n".join(counts) + "\n")
    return folder
