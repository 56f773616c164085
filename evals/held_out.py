"""What the embedded model is measured by. Nothing may be tuned on these requests, nor they on a result: `development.py`
is for that. The folder is another one, too."""

from __future__ import annotations

from evals.checks import (
    Requests,
    both,
    either,
    ends,
    first,
    holds,
    lists,
    says,
    tells_date,
    tells_time,
    truthful,
)

FILES = {
    "README.md": "# Orchard\n\nA small program that keeps track of apple trees and their harvest.\n\nStart it with `python3 harvest.py`.\n",
    "harvest.py": "BASKET_KG = 12\n\n\ndef baskets(kilos):\n    # FIXME: round up\n    return kilos // BASKET_KG\n\n\nprint(baskets(60))\n",
    "settings.yaml": "name: orchard\nlanguage: de\nworkers: 6\nverbose: true\n",
    "diary.txt": "1 May: planted two trees\n9 May: first blossoms\n30 May: hail, roof damaged\n",
    "trees.csv": "kind,height_m,planted\nBoskoop,6,1998\nElstar,4,2011\nGala,3,2016\nTopaz,5,2007\nBraeburn,7,1995\n",
    "notes/visit.md": "# Visit\n\nHelena comes on Friday with the ladder.\n",
    "lib/prices.py": "def price(kilos):\n    return kilos * 3\n",
    "todo.txt": "- repair fence\n- order crates\n",
    "draft.tmp": "x\n",
}
PAST = [
    ("user", "Let us talk about the new kitchen."),
    ("assistant", "We settled on oak worktops and green tiles for the kitchen."),
]


# Each tool, or an answer. Only the first call counts; a search service is set up.
TOOLS: Requests = [
    ("can you explain what harvest.py is doing?", first("read_file terminal", r"harvest\.py")),
    ("what's written in notes/visit.md?", first("read_file terminal", r"notes/visit\.md")),
    ("which workers value does settings.yaml have?", first("read_file search_files terminal", r"settings\.yaml|workers")),
    ("create a file greeting.txt that says Welcome to the orchard", first("write_file terminal", r"greeting\.txt.*Welcome to the orchard|Welcome to the orchard.*greeting\.txt")),
    ("make me a bash script backup.sh that copies diary.txt to diary.bak", first("write_file", r"backup\.sh.*cp .*diary\.txt .*diary\.bak")),
    ("replace Helena by Ruth in notes/visit.md", first("patch terminal", r"Helena.*Ruth")),
    ("set workers to 8 in settings.yaml", either(first("patch terminal", r"workers.*8"), first("read_file", r"settings\.yaml"))),
    ("which of my files mention the ladder?", first("search_files terminal", "ladder")),
    ("find every FIXME in this project", first("search_files terminal", "FIXME")),
    ("where is the function price defined?", first("search_files terminal", "price")),
    ("how many files are there altogether, with subfolders?", first("terminal", r"find|ls .*-\w*R")),
    ("delete draft.tmp", first("terminal", r"rm .*draft\.tmp")),
    ("is git installed here, and which version?", first("terminal", r"git.*(-v|version)|which git")),
    ("what's the current price of a barrel of oil?", first("web_search", "(?i)oil")),
    ("search the internet for the opening hours of the Louvre", first("web_search", "(?i)louvre")),
    ("remember that my daughter's birthday is on 4 March", first("memory", "add.*March")),
    ("I prefer metric units, please keep that for all our future talks", first("memory", "add.*metric")),
    ("what did we decide about the kitchen last week?", first("session_search", "(?i)kitchen")),
    ("did I ever mention to you which plumber I use?", first("session_search", "(?i)plumber")),
    ("in 45 minutes remind me to take the bread out of the oven", first("cronjob", "create.*45m.*(bread|oven)")),
    ("every Sunday at 9 in the evening remind me to put the bins out", first("cronjob", r"create.*0 21 \* \* (0|7|sun).*bins")),
    ("what is the boiling point of water in celsius?", says(r"\b100\b")),
    ("name a synonym for happy", says("joy|glad|cheer|content|delight|pleased|elated|ecstatic|merry|jolly|bliss")),
    ("how do I undo the last git commit?", says("git (reset|revert)")),
]  # fmt: skip
# Two steps, then three, carried out.
LOOPS: Requests = [
    ("which tree in trees.csv is the tallest?", ends("braeburn", unless="is the boskoop|elstar is|gala is|topaz is")),
    ("who comes on Friday according to notes/visit.md?", ends("helena")),
    ("what is printed when harvest.py runs?", ends(r"\b5\b|five")),
    ("in which year was the Elstar in trees.csv planted?", ends("2011", unless="1998|2016|2007|1995")),
    ("how many trees does trees.csv list?", ends(r"\b5\b|five", unless=r"\b6 trees")),
    (
        "replace 'repair fence' by 'paint fence' in todo.txt and show me the file afterwards",
        both(holds("todo.txt", "paint fence.*order crates"), ends("paint fence.*order crates")),
    ),
    (
        "create a folder archive and move draft.tmp into it",
        both(holds("archive/draft.tmp", "x"), lambda done: not done.text("draft.tmp")),
    ),
    ("find the file that mentions hail and copy it to hail.txt", holds("hail.txt", "first blossoms.*roof damaged")),
    ("read diary.txt, then write the date of the hail into hail-date.txt", holds("hail-date.txt", r"\b30 May")),
    (
        "write a script square.py that prints 7*7, run it and tell me the result",
        both(holds("square.py", r"7 ?\* ?7|49"), lambda done: done.called("terminal", r"square\.py"), ends(r"\b49\b")),
    ),
    (
        "look up the language in settings.yaml and add a line with it to todo.txt",
        holds("todo.txt", r"repair fence.*order crates.*\b(de|german)\b"),
    ),
    (
        "count the lines in diary.txt, write the number to lines.txt and then show me what lines.txt contains",
        both(holds("lines.txt", r"^\s*3\b"), ends(r"\b3\b|three")),
    ),
]
# What cannot be known here must not be made up. No search service is set up in this set and those below.
REFUSALS: Requests = [
    ("summarise contract.docx", truthful("part(y|ies)|agreement between|clause")),
    ("what does diary.txt say about 12 June?", truthful("june:|on 12 june,? (we|I|the)")),
    ("how warm is it in Madrid right now?", truthful(r"sunny|cloudy|\d+ ?(°|degrees)")),
    ("who won yesterday's tennis final?", truthful("djokovic|alcaraz|sinner|nadal|federer|williams|won by")),
    ("what did we agree on about the boat?", truthful("we (agreed|settled|decided) (on|to|that)|oak|tiles")),
    ("what's my shoe size?", truthful(r"\b[34]\d\b")),
    ("what colour is the door in photo.jpg?", truthful("door is|door in the photo is (?!not)")),
    ("when is my next dentist appointment?", truthful(r"\d:\d\d|monday|tuesday|wednesday|thursday|friday")),
]
GERMAN: Requests = [
    ("Was macht harvest.py?", ends("korb|körbe|kilo|basket|ernte")),
    ("Liste alle Dateien in diesem Ordner auf", lists("harvest.py", "diary.txt", "trees.csv")),
    ("Erinnere mich in 25 Minuten an die Wäsche", first("cronjob", "create.*25m.*(W[äa]e?sche|laundry)")),
    ("Merke dir bitte: mein Sohn heißt Jonas", first("memory", "add.*Jonas")),
    ("Was hatten wir zur Küche vereinbart?", first("session_search", "(?i)küche|kitchen")),
    ("Lege eine Datei einkauf.txt mit Milch und Brot an", holds("einkauf.txt", "milch.*brot")),
    ("Wie hoch ist der Topaz laut trees.csv?", ends(r"\b5\b|fünf")),
    ("Erkläre in einem Satz, was ein Kompass ist", both(says(r"\b(ein|der|das|die) "), says("richtung|nord|magnet"))),
]
# First requests, as people write them who have just installed it.
NEWCOMER: Requests = [
    ("hello, who is this?", says("hermes")),
    ("what sort of things can you help me with?", says("file|command|remind")),
    ("are you ChatGPT?", says(r"hermes|qwen|\bno\b")),
    ("what model is behind you?", says("qwen")),
    ("what's the date?", tells_date),
    ("do you know what time it is?", tells_time),
    ("will it rain in Hamburg tomorrow?", truthful(r"it will|yes|\d ?%|sunny|cloudy|\d ?°")),
    ("give me a packing list for a weekend in the mountains", says("(jacket|boots|shoes|socks).*\n.*(water|food|snack|map|hat|gloves|tent|first.aid)")),
    ("write a short birthday poem for my mother", says("(mother|birthday|mom|mum|love).*\n.*\\w")),
    ("what's README.md about?", ends("apple|tree|harvest|orchard")),
    ("explain this project to me", ends("apple|tree|harvest|orchard")),
    ("what do I have in this folder?", lists("harvest.py", "diary.txt", "trees.csv", "todo.txt")),
    ("check harvest.py for mistakes", both(first("read_file terminal", r"harvest\.py"), ends(r"\w"))),
    ("summarise what changed in git", both(first("terminal", "git"), truthful("changes include|commit [0-9a-f]{6}"))),
    ("wake me at 6:30 tomorrow", lambda done: done.first("cronjob", f"create.*{done.tomorrow}T06:30")),
    ("remind me every morning at 8 to take my pills", first("cronjob", r"create.*'0?0 0?8 \* \* \*'.*pills")),
    ("my name is Oskar, please remember that", first("memory", "add.*Oskar")),
    ("what did I ask you yesterday?", both(first("session_search", ""), truthful("you asked me (to|about|for|if)"))),
    ("what's my favourite food?", truthful(r"favou?rite food is (?!not)")),
    ("how do you say 'thank you very much' in Italian?", says("grazie")),
    ("what is 15% of 240?", either(says(r"\b36\b"), ends(r"\b36\b"))),
    ("write a shopping list with eggs, rice and tea to shopping.txt", holds("shopping.txt", "eggs.*rice.*tea")),
    ("which files contain the word FIXME?", ends(r"harvest\.py", unless=r"prices\.py|diary|trees\.csv|todo\.txt")),
    ("how much memory does this computer have?", both(first("terminal", "free|meminfo|vmstat|top"), ends(r"\d"))),
    (
        "write a python program that prints the even numbers up to 20, and run it",
        both(lambda done: done.called("terminal", r"python3? .*\.py|python3? -c"), ends(r"\b18\b.*\b20\b|even numbers")),
    ),
    (
        "rename draft.tmp to final.txt",
        both(holds("final.txt", "x"), lambda done: not done.text("draft.tmp")),
    ),
    ("why is the sky blue?", says("scatter")),
]  # fmt: skip
KINDS = {"tools": TOOLS, "loops": LOOPS, "refusals": REFUSALS, "german": GERMAN, "newcomer": NEWCOMER}
TARGETS = {"tools": 20, "loops": 11, "refusals": 8, "german": 6, "newcomer": 20}
