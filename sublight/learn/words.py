"""The words around an exercise's texts (map, roadmap, hints, goals) in the languages of the texts.

The English words stand where they are used, and are the key to the others. What a check finds wrong in a kernel stays
in English, as xray and the compiler say it: the pages quote it so.
"""

from __future__ import annotations

CHINESE = {
    # chapters
    "First kernels": "入门 kernel",
    "Rows": "行",
    "Movement": "搬运",
    "Products": "矩阵乘法",
    "Attention": "注意力",
    "Diagnosis": "诊断",
    # the map
    "exercise": "练习",
    "what": "内容",
    "checks": "检查",
    "best": "最好",
    "trend": "走势",
    ", ": "，",
    "0 of {count} passed: `sublight learn start {first}` begins": (
        "{count} 个练习，通过 0 个：从 `sublight learn start {first}` 开始"
    ),
    "{passed} of {count} passed, {share} of the way on {date}": (
        "{date}：{count} 个练习，通过 {passed} 个，走完全程的 {share}"
    ),
    "{standing}: {gain} more than on {date}": "{standing}，比 {date} 多 {gain}",
    "{standing}: as far as on {date}": "{standing}，与 {date} 相同",
    "day by day: {bars}": "逐日进展：{bars}",
    "{left} left": "还剩 {left} 个",
    "goal: {name}: {standing}": "目标：{name}：{standing}",
    "goal: {name} by {due}: {standing}": "目标：{name}，期限 {due}：{standing}",
    "next: sublight learn start {name}": "下一个：sublight learn start {name}",
    "all is done": "全部完成",
    "reached": "已达到",
    "{days} days late": "已过期 {days} 天",
    "{days} days: {rate} exercises a week": "{days} 天，每周 {rate} 个",
    # the roadmap
    "Your way to fast kernels": "你的 kernel 之路",
    "The shortest way to {name}": "到 {name} 的最短路径",
    "Day by day": "逐日进展",
    "how far along": "走了多远",
    "of the way": "全程",
    "days since {first}": "从 {first} 起的天数",
    "No goal is set: {command} sets one.": "还没有目标：用 {command} 设一个。",
    "Goals": "目标",
    "goal": "目标",
    "by": "期限",
    "left to do": "还要做",
    "{best} of the limit": "极限的 {best}",
    "1 check": "检查 1 次",
    "{count} checks": "检查 {count} 次",
    "after {names}": "先做 {names}",
    "from check to check": "逐次检查",
    # start, hint, next, goal
    "{file} is yours to fill in": "{file} 已经建好，等你补全",
    "{file} was there already, and was left as it is": "{file} 原来就有，没有动它",
    "then: sublight learn check {name}": "然后：sublight learn check {name}",
    "hint {level} of {levels}; sublight learn hint {name}   gives the next": (
        "第 {level} 个提示，共 {levels} 个；sublight learn hint {name}   给下一个"
    ),
    "all {levels} hints; there is no other": "全部 {levels} 个提示；没有更多了",
    "hint {level} of {levels}; that was the last hint": "第 {level} 个提示，共 {levels} 个；这是最后一个",
    "every exercise has passed": "所有练习都通过了",
    "{name}: {title}": "{name}：{title}",
    "{name} has passed: the goal is reached": "{name} 已通过：目标达到了",
    "to {name}: {left} left": "到 {name}：还剩 {left} 个",
    "to {name} by {due}: {left} left": "在 {due} 之前到 {name}：还剩 {left} 个",
    "{name} is no goal any more": "{name} 不再是目标",
    # a check
    "{name}: passed": "{name}：通过",
    "{name}: passed, and its code allows {fraction} of the {gpu}'s limit": (
        "{name}：通过，这样的代码最多达到 {gpu} 极限的 {fraction}"
    ),
    "{name}: passed, and reaches {fraction} of this {gpu}'s limit": "{name}：通过，达到这块 {gpu} 极限的 {fraction}",
    "{name}: right, but not yet fast enough": "{name}：结果对，但还不够快",
    "{name}: right, but not yet answered": "{name}：结果对，但问题还没有答好",
    "{name}: not yet right": "{name}：还不对",
    "at {case}": "条件：{case}",
    "it printed:": "它打印了：",
    "on {gpu} at {case}: {least} must move, which takes {floor}": "{gpu}，{case}：必须搬 {least}，需要 {floor}",
    "on {gpu} at {case}: {least} must move, which takes {floor}; this code allows {fraction} of that speed": (
        "{gpu}，{case}：必须搬 {least}，需要 {floor}；这样的代码最多达到这个速度的 {fraction}"
    ),
    "read off the compiled code: a bound, not a measurement": "这是从编译出的代码读出的上限，不是实测",
    "sublight learn solution {name}   compares with ours; sublight learn next   goes on": (
        "sublight learn solution {name}   和我们的比较；sublight learn next   继续"
    ),
    "watching {file}: save to check again, Ctrl-C ends": "正在看着 {file}：保存就重新检查，按 Ctrl-C 结束",
    "sublight learn hint {name}   gives a hint": "sublight learn hint {name}   给一个提示",
    # ask, submit, export, import
    "written to {file}: give it to your assistant": "已写入 {file}：交给你的助手",
    "paste this to your assistant, or set {variable} to send it": "把它贴给你的助手，或者设好 {variable} 直接发送",
    "{model} at {url} is asked": "正在问 {url} 的 {model}",
    "the board has run it: {fraction} of the {gpu}'s limit": "排行榜运行过了：达到 {gpu} 极限的 {fraction}",
    "the board has run it, and it has not passed: {reason}": "排行榜运行过了，没有通过：{reason}",
    "kept, but not run and not ranked: {reason}": "已收下，但没有运行，也不排名：{reason}",
    "it still waits ({state}): the page shows what becomes of it": "还在等待（{state}）：结果会显示在它的页面上",
    "{count} checks written to {file}": "{count} 次检查已写入 {file}",
    "{count} rows of {file} were new": "{file} 里有 {count} 行是新的",
    # what cannot be done
    "which exercise? Name one, or begin with `sublight learn start {name}`": (
        "哪个练习？请写出名字，或者从 `sublight learn start {name}` 开始"
    ),
    "{file} has the name of no exercise: call it as in copy.py; `sublight learn` shows all": (
        "{file} 不是任何练习的名字：请按练习命名，例如 copy.py；`sublight learn` 会列出全部练习"
    ),
    "there is no {file}: `sublight learn start {name}` writes learn/{written}": (
        "没有 {file}：`sublight learn start {name}` 会写出 learn/{written}"
    ),
    "boards take Triton alone: `sublight learn submit {name}`": "排行榜只收 Triton：`sublight learn submit {name}`",
    "in CUDA C++, too ({done} of {count} passed): {names}": (
        "也可以用 CUDA C++ 做（{count} 个，通过 {done} 个）：{names}"
    ),
    "measured on this {gpu} at {case}: {seconds} a call, {fraction} of the limit": (
        "在这块 {gpu} 上实测，{case}：每次调用 {seconds}，达到上限的 {fraction}"
    ),
    "cannot read {file}: {error}; it must be a text file in UTF-8": "读不了 {file}：{error}；它必须是 UTF-8 的文本文件",
    "every exercise has passed: name one to do it again": "所有练习都通过了：想再做一遍，请写出名字",
    "cannot write {file}: {error}; go to a folder of your own": "写不了 {file}：{error}；请换到你自己的目录",
    "{name} has not passed yet: `sublight learn hint {name}` helps on, --anyway shows it": (
        "{name} 还没有通过：`sublight learn hint {name}` 给提示，--anyway 直接显示"
    ),
    "{name} is right or wrong, and has no ranking: `sublight learn check` says which": (
        "{name} 只有对错，没有排名：`sublight learn check` 会告诉你"
    ),
    "{name} has not passed here, so nothing was sent: --anyway sends it all the same": (
        "{name} 在这里没有通过，所以没有提交：--anyway 照样提交"
    ),
    "{name} is no goal of yours: `sublight learn` shows your goals": (
        "{name} 不是你的目标：`sublight learn` 显示你的目标"
    ),
    "--by {due} is past: name a day to come": "--by {due} 已经过去：请写一个将来的日期",
    "no goal is set: `sublight learn goal softmax --by 2027-01-31` sets one": (
        "还没有目标：用 `sublight learn goal softmax --by 2027-01-31` 设一个"
    ),
}


def say(language: str, words: str, **parts: object) -> str:
    """The words in that language, with their gaps filled.

    >>> say("en", "{left} left", left=3), say("zh", "{left} left", left=3)
    ('3 left', '还剩 3 个')
    """
    return (CHINESE[words] if language == "zh" else words).format(**parts)
