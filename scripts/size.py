"""The size of the code as a table: lines per file, functions over 40 lines, tests against code.

It only prints; whether a number is too large is for a reader to say.
"""

import ast
from pathlib import Path

CODE, TESTS, LONG_FILE, LONG_FUNCTION = ("tierd", "storage", "policies"), "tests", 250, 40


def main() -> None:
    root = Path(__file__).parents[1]
    paths = sorted(path for folder in (*CODE, TESTS) for path in (root / folder).rglob("*.py"))
    texts = {path.relative_to(root): path.read_text() for path in paths}
    lines = {file: text.count("\n") for file, text in texts.items()}
    print("\nlines  file")
    for file, count in lines.items():
        print(f"{count:5}{'*' if count > LONG_FILE else ' '} {file}")
    long = [line for file, text in texts.items() for line in functions(file, text)]
    print(f"\nfunctions over {LONG_FUNCTION} lines: {len(long)}", *long, sep="\n  ")
    tests = sum(count for file, count in lines.items() if file.parts[0] == TESTS)
    code = sum(lines.values()) - tests
    print(f"\n{code} lines of code, {tests} of tests: 1 to {tests / max(code, 1):.2f}")
    print(f"* over {LONG_FILE} lines\n")


def functions(file: Path, text: str) -> list[str]:
    """One line for each function that is too long."""
    found = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        f"{end - start + 1:3}  {file}:{start} {name}"
        for start, end, name in found
        if end - start >= LONG_FUNCTION
    ]


if __name__ == "__main__":
    main()
