"""What a hot place in the user's Python does, and what to do about it: by what it calls, by its text, by its loop."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from sublight.diagnose.python import Spot
from sublight.diagnose.source import text_of
from sublight.trace.record import Trace

WAITS = 0.5  # of a place's time: then it does not compute, it waits


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of Python work: how it is known, how it is called, what helps."""

    does: str  # after the name of a function: "saves a checkpoint"
    fix: str
    files: str = ""  # of the library that it calls, from the package on, and the function there
    text: str = ""  # of the line
    function: str = ""


SAVE = Kind(
    does="saves a checkpoint",
    files=r"^torch/serialization\.py|^safetensors/|^torch/distributed/checkpoint/",
    text=r"torch\.save\(|save_pretrained\(|save_checkpoint\(|save_file\(",
    fix="""\
if step % 1000 == 0:                 # not in every step
    torch.save(model.state_dict(), path)""",
)
TOKENISE = Kind(
    does="tokenises text",
    files=r"^tokenizers/|^transformers/tokenization|^tiktoken/|^sentencepiece|^transformers/models/[^/]+/tokenization",
    text=r"tokeni[sz]er?\(|tokeni[sz]er\.|\.encode\((?!['\"]utf)",
    function=r"tokeni[sz]e",
    fix="""\
# tokenise the whole data once, before the loop, and keep the numbers
dataset = dataset.map(tokenize, batched=True)      # or: ids = tokenizer(texts)["input_ids"], saved to a file""",
)
PRINT = Kind(
    does="prints or logs",
    files=r"^(logging|tqdm|wandb|mlflow|rich|loguru|tensorboard|torch/utils/tensorboard|neptune|comet_ml)[/.]",
    text=r"(?<![\w.])print\(|\blog(ger|ging)?\.\w+\(|\.add_scalar\(|wandb\.log\(|\.write\(",
    fix="""\
if step % 100 == 0:                  # not in every step
    print(f"{step} {loss.item():.4f}")""",
)
METRIC = Kind(
    does="computes a metric in Python",
    files=r"^(sklearn|torchmetrics|evaluate|seqeval|nltk|sacrebleu|rouge_score)/",
    function=r"metric|accuracy|precision|recall|(^|_)f1($|_)|(^|_)auc($|_)|bleu|rouge|confusion|score",
    fix="""\
correct += (logits.argmax(-1) == labels).sum()     # tensors on the device, read once at the end: correct.item()
# or only in every hundredth step""",
)
DATA = Kind(
    does="reads or prepares data",
    files=r"^(json|csv|pickle|PIL|cv2|pandas|pyarrow|datasets|h5py|torchvision|imageio|gzip|zipfile)[/.]",
    text=r"json\.loads?\(|pickle\.loads?\(|Image\.open\(|(?<![\w.])open\(|read_csv\(|np\.load\(",
    function=r"__getitem__|collate|(^|\.)(load|read|prepare|preprocess|augment)\w*$",
    fix="""\
# in a Dataset's __getitem__, so that DataLoader workers do it beside the step; what is the same in every epoch once
DataLoader(dataset, batch_size=..., num_workers={workers})""",
)
WRITE = Kind(
    does="writes results out",
    files=r"^json/encoder|^(json/__init__|pickle)\.py _?dumps?$|^csv\.py .*write|^yaml/.* .*(dump|represent|serialize)",
    text=r"(json|pickle|yaml)\.(safe_)?dumps?\(|\.to_(csv|json|parquet)\(|np\.savez?\(|\.writerows?\(",
    fix="""\
if step % 100 == 0:                  # not in every step; and only what is new since
    file.write(json.dumps(record) + "\\n")""",
)
COPY = Kind(
    does="copies Python objects",
    files=r"^copy\.py",
    text=r"deepcopy\(",
    fix="# copy once before the loop; tensors: x.clone(), or a second buffer that is written with copy_",
)
BUILD = Kind(
    does="turns a Python list into a tensor, element by element",
    text=r"torch\.(tensor|as_tensor|(Float|Long|Int|Double|Bool)Tensor)\(|np\.(array|asarray|fromiter)\(",
    fix="""\
positions = torch.arange(length, device=device)    # tensor ops from the start, on the device, not a list of numbers
# a list that must be: np.fromiter or array.array, and torch.from_numpy; once, where it is the same in every step""",
)
LOOP = Kind(
    does="goes over elements one by one in Python",
    fix="""\
# one tensor op over all of them, on the device, instead of a loop:
#   torch.where, gather, cumsum, index_add_, scatter_reduce; torch.arange instead of a list of numbers
# what is the same in every step: once, before the loop""",
)
WAIT = Kind(
    does="waits (a sleep, a lock, a file, the network), and computes nothing",
    text=r"\bsleep\(|requests\.|urlopen\(|subprocess\.",
    files=r"^(subprocess|socket|ssl|urllib|requests|http|queue|threading|selectors|multiprocessing)[/.]",
    fix="# do it in a thread or in DataLoader workers, so that the step goes on meanwhile; or not in every step",
)
OPTIMIZER = Kind(
    does="steps the optimizer, in its own Python",
    files=r"^torch/optim/(?!lr_scheduler)",
    text=r"\bopt(im\w*)?\.(step|zero_grad)\(",
    fix="""\
# needed in every step; it costs a little for each parameter tensor, less where one op updates them all:
optimizer = torch.optim.AdamW(model.parameters(), ..., fused=True)   # so also Adam, SGD, Adagrad""",
)
CALL = Kind(
    does="runs the model, in torch's own Python",
    files=r"^torch/(nn/(modules|parallel)/|_tensor\.py \S*backward|autograd/|_dynamo/|amp/)",
    text=r"\.backward\(",
    function=r"(^|\.)(forward|training_step|validation_step)$",
    fix="""\
# needed in every step, and of one size for a call: a larger batch makes it a smaller part of the step""",
)
OTHER = Kind(
    does="runs in Python between ops",
    fix="# once, before the loop, where it is the same in every step; else with tensor ops, or in DataLoader workers",
)
BY_NAME = (SAVE, TOKENISE, METRIC, WRITE, PRINT, COPY, DATA, BUILD)
OF_TORCH = (OPTIMIZER, CALL)  # no work of the user's: nothing there can be left out


def kind_of(spot: Spot, trace: Trace) -> Kind:
    """What it does: what it calls tells most, then the line's text, its function's name, and a loop around it."""
    line = text_of(trace, spot.file, spot.line)
    if spot.waited > WAITS and not any(_calls(kind, spot) for kind in (*BY_NAME, *OF_TORCH)):
        return WAIT
    by_call = (kind for kind in (*BY_NAME, WAIT) if _calls(kind, spot))
    by_text = (kind for kind in (*BY_NAME, WAIT) if kind.text and re.search(kind.text, line))
    if kind := next(by_call, None) or next(by_text, None):
        return kind
    calls_torch = any(_calls(kind, spot) for kind in OF_TORCH)  # in a caller's loop: over layers, not over elements
    in_loop = line and in_a_loop(spot, trace, own_only=calls_torch)
    for kind in BY_NAME:
        if _is_named(kind, spot):
            return kind
    if in_loop:
        return LOOP
    torch_by_call = (kind for kind in OF_TORCH if _calls(kind, spot))
    torch_by_text = (kind for kind in OF_TORCH if re.search(kind.text, line) or _is_named(kind, spot))
    return next(torch_by_call, None) or next(torch_by_text, OTHER)


def _is_named(kind: Kind, spot: Spot) -> bool:
    return bool(kind.function and re.search(kind.function, spot.function, re.IGNORECASE))


def _calls(kind: Kind, spot: Spot) -> bool:
    return bool(kind.files) and any(re.search(kind.files, f"{frame.file} {frame.function}") for frame in spot.called)


def in_a_loop(spot: Spot, trace: Trace, *, own_only: bool = False) -> bool:
    """Whether a loop goes on around the line that is not the loop over the steps; `own_only`: in its own function.

    That one is the outermost loop of the first function from outside that has any, or one that trains.
    """
    seen_loop = False
    for at, frame in enumerate(spot.stack, 1):
        if not text_of(trace, frame.file, frame.line):
            continue
        loops = [loop for loop in loops_of(frame.file) if loop.first <= frame.line <= loop.last]
        for loop in loops:  # outermost first
            counts = at == len(spot.stack) or not own_only
            if counts and (seen_loop or loop.in_expression) and not loop.trains:
                return True
            seen_loop = seen_loop or not loop.in_expression
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Lines that run many times."""

    first: int
    last: int
    in_expression: bool = False  # a comprehension, or a generator
    trains: bool = False  # it calls backward() or step()


def loops_of(file: str) -> tuple[Loop, ...]:
    """The loops in a file, outer ones first; none where it cannot be read."""
    try:
        return _loops_in(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()


@functools.lru_cache(maxsize=16)
def _loops_in(source: bytes) -> tuple[Loop, ...]:
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        expression = isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        if expression or isinstance(node, ast.For | ast.While | ast.AsyncFor):
            first, last = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
            if not expression and len(body := node.body) and body[0].lineno > first:  # type: ignore[attr-defined]
                first = body[0].lineno  # what stands in the head runs once
            found.append(Loop(first=first, last=last, in_expression=expression, trains=_trains(node)))
    return tuple(sorted(found, key=lambda loop: (loop.first, -loop.last)))


def _trains(node: ast.AST) -> bool:
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "step")
        for call in ast.walk(node)
    )
