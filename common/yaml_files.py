"""Configuration files: YAML read strictly, before anything makes sense of it."""

import yaml


def check(stream: str) -> None:
    """yaml.YAMLError for a key said twice in one mapping, and for a class with something beside path and arguments."""
    node = yaml.compose(stream, Loader=yaml.SafeLoader)
    _refuse_duplicates(node)
    _check_classes(node, "")


def _refuse_duplicates(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.YAMLError(
                    f"the key {key.value!r} stands in line {seen[key.value]} and in line {line}; keep one"
                )
            seen[key.value] = line
            _refuse_duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item)


CLASS = ("class_path", "init_args", "dict_kwargs")


def _check_classes(node: yaml.Node | None, key: str) -> None:
    """A class is its path and its arguments, and nothing beside them."""
    if isinstance(node, yaml.SequenceNode):
        if key in ("model", "data", "trainer"):
            raise yaml.YAMLError(f"{key} is a list (line {node.start_mark.line + 1}); wanted keys and values")
        for number, item in enumerate(node.value):
            _check_classes(item, f"{key}.{number}")
    if not isinstance(node, yaml.MappingNode):
        return
    children = {name.value: value for name, value in node.value if isinstance(name, yaml.ScalarNode)}
    if "class_path" in children or "init_args" in children:
        where = f"{key or 'the file'} (line {node.start_mark.line + 1})"
        if others := [name for name in children if name not in CLASS]:
            raise yaml.YAMLError(
                f"{where}: {others[0]} stands beside class_path and init_args; put arguments under init_args"
            )
        path, arguments = children.get("class_path"), children.get("init_args")
        if path is not None and path.tag != "tag:yaml.org,2002:str":
            raise yaml.YAMLError(f"{where}: class_path is {path.value or path.tag}; wanted the name of a class")
        if (
            arguments is not None
            and not isinstance(arguments, yaml.MappingNode)
            and arguments.value not in ("", "null")
        ):
            raise yaml.YAMLError(f"{where}: init_args is {arguments.value}; wanted the arguments by name")
    for name, value in children.items():
        _check_classes(value, f"{key}.{name}" if key else name)
