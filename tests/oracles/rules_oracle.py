"""Rules of detection for one series, value by value, with plain floats: the slow and obvious reference.

Each function takes the values of one series and returns one level for each: 0 normal, 1 warning, 2 alarm.
"""

from __future__ import annotations

import math


def absolute_and_jump(values, c_min_steps, t1=1e6, t2=1e4, c1=1e5, c2=5e3):
    """ASD of the first two generations."""
    levels, pre, low, high = [], 0.0, 0.0, 0.0
    for step, value in enumerate(values):
        if not math.isfinite(value):
            levels.append(2)
            continue
        ratio = (value - pre) / (high - low) if step >= c_min_steps and high > low else 0.0
        levels.append(2 if value > t1 or ratio > c1 else 1 if value > t2 or ratio > c2 else 0)
        pre, low, high = value, min(low, value), max(high, value)
    return levels


def moving_average(values, ratio1=1e6, ratio2=1e4, decay=0.99):
    """ASD of the third generation."""
    levels, average, step = [], 0.0, 0
    for one in values:
        if not math.isfinite(one):
            levels.append(2)
            continue
        value = one * one
        scale = value if step == 0 else average / (1 - decay**step)
        levels.append(2 if value > ratio1 * scale else 1 if value > ratio2 * scale else 0)
        average, step = decay * average + (1 - decay) * value, step + 1
    return levels


def combined(values, t1=1e6, t2=100.0, decay=0.99):
    """The combined ASD: strikes are 2."""
    levels, average, n, previous = [], 0.0, 0, 0.0
    for one in values:
        value = one * one
        if value == 0:
            levels.append(0)
            continue
        if not math.isfinite(value):
            levels.append(2)
            continue
        limit1 = limit2 = value
        if n >= 10 and average != 0:
            scale = average / (1 - decay**n)
            limit1, limit2 = t1 * scale, t2 * scale
        if value > limit1 and abs(value - previous) > limit1:
            levels.append(2)
        elif value <= limit2:
            levels.append(0)
            average, n = decay * average + (1 - decay) * value, n + 1
        else:
            levels.append(1)
        previous = value
    return levels


def robust_z(values, elements=100, window=50, warm_up=20, early=80, relearn=8):
    """The robust z of logarithms, with the default thresholds."""
    levels, clean, learnt, up_reach, down_reach, run, zeros = [], [], 0, 0.0, 0.0, [], 0
    kept = 0.5 ** (1 / 600)
    for value in values:
        if not math.isfinite(value):
            levels.append(2)
            continue
        if learnt < warm_up or (value == 0 and zeros >= relearn):
            run, level = [], 0
            if value:
                clean, learnt = [*clean, math.log(value)][-window:], learnt + 1
                up_reach, down_reach = kept * up_reach, kept * down_reach
            else:
                zeros = relearn
            levels.append(level)
            continue
        zeros += value == 0
        log = math.log(value) if value else math.log(5e-324)
        middle = sorted(clean)[len(clean) // 2]
        deviation = sorted(abs(one - middle) for one in clean)[len(clean) // 2]
        wide = 24 * max(1.4826 * deviation, 0.02)
        up = max(min(wide, math.log(40)), 3.5 * up_reach)
        down = max(min(wide, math.log(100)), 3.5 * down_reach, 18 / elements)
        early_share = min(max(2 - learnt / early, 0), 1)
        up += early_share * max(math.log(10000) - up, 0)
        down += early_share * max(math.log(100) - down, 0)
        distance = log - middle
        score = distance / up if distance > 0 else -distance / down
        if score < 1:
            levels.append(1 if score >= 0.75 else 0)
            run = []
            if value:
                clean, learnt = [*clean, log][-window:], learnt + 1
                up_reach, down_reach = max(kept * up_reach, distance), max(kept * down_reach, -distance)
            continue
        agrees = run and max([*run, log]) - min([*run, log]) <= up
        run = [*run, log] if agrees else [log]
        levels.append(1 if agrees else 2)
        if len(run) == relearn:
            if value:
                shift = sum(run) / relearn - middle
                clean = [one + shift for one in clean]
                up_reach = max(up_reach, math.log(40) / 3.5)
                down_reach = max(down_reach, math.log(40) / 3.5)
            run = []
    return levels
