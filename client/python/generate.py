#!/usr/bin/env python3
"""generate.py HEADER {python | c} OUTPUT: what ctypes has to know of client/shd.h.

python  the module libshd._c: enumerations, structs, and the type of every function
c       a program that prints size and offset of everything in those structs, as the compiler has
        them, for a test to compare

The header is of one style, and only that is read: enums, structs of plain fields, functions behind
SHD_API. What is not understood is an error, never left out.
"""
import re
import sys

PLAIN = {'bool': 'c_bool', 'char': 'c_char', 'int': 'c_int', 'double': 'c_double', 'float': 'c_float',
         'size_t': 'c_size_t', 'int32_t': 'c_int32', 'int64_t': 'c_int64', 'uint8_t': 'c_uint8',
         'uint16_t': 'c_uint16', 'uint32_t': 'c_uint32', 'uint64_t': 'c_uint64', 'void': 'None'}


def read(path):
    """The header without comments and with each macro's continuation joined."""
    with open(path, encoding='utf-8') as file:
        text = file.read()
    return re.sub(r'/\*.*?\*/', ' ', text, flags=re.S).replace('\\\n', ' ')


class Header:
    """Constants, structs and functions, in the header's order."""

    def __init__(self, text):
        self.constants = {}  # name: value
        self.strings = {name: value for name, value in re.findall(r'#define (SHD_\w+)\s+"([^"]*)"', text)}
        self.structs = {}    # name: [(field, type, count)]
        self.functions = {}  # name: (type, [argument types])
        self.enums = []
        for name, value in re.findall(r'#define (SHD_\w+)[ \t]+([^"\n]+)', text):
            if re.fullmatch(r'[\d\s()*+]*', number := re.sub(r'\(size_t\)|(?<=\d)[uUlL]+', '', value)):
                self.constants[name] = eval(number)  # digits, brackets, * and + alone
        text = '\n'.join(line for line in text.splitlines() if not line.startswith('#'))
        text = text.replace('extern "C" {', '')
        for name, body in re.findall(r'\benum (\w+) \{(.*?)\};', text, re.S):
            self.read_enum(name, body)
        self.opaque = set(re.findall(r'typedef struct \w+ (\w+);', text))
        for name, body in re.findall(r'^struct (\w+) \{(.*?)^\};', text, re.S | re.M):
            self.structs[name] = [self.declared(part) for part in body.split(';') if part.strip()]
        for declaration in re.findall(r'SHD_API\s+(.*?);', text, re.S):
            self.read_function(' '.join(declaration.split()))

    def read_enum(self, name, body):
        self.enums.append(name)
        value = -1
        for part in filter(None, (part.strip() for part in body.split(','))):
            label, _, number = part.partition('=')
            value = int(number, 0) if number else value + 1
            self.constants[label.strip()] = value

    def type_of(self, words, stars):
        """The ctypes type of a C type without its stars, `const` left out."""
        words = [word for word in words.split() if word != 'const']
        name = words[-1]
        if words[0] == 'struct':
            base = name
        elif words[0] == 'enum' and name in self.enums:
            base = 'c_int'
        elif name in self.opaque:
            base = 'None'
        elif len(words) == 1 and name in PLAIN:
            base = PLAIN[name]
        else:
            raise SystemExit(f'generate.py: type {" ".join(words)!r} is not understood')
        if stars and base == 'None':
            base, stars = 'c_void_p', stars - 1
        elif stars and base == 'c_char':
            base, stars = 'c_char_p', stars - 1
        return 'POINTER(' * stars + base + ')' * stars

    def arguments(self, text):
        return [] if text.strip() in ('', 'void') else [self.declared(part)[1] for part in self.split(text)]

    @staticmethod
    def split(text):
        """Cut at the commas outside of brackets."""
        parts, depth = [''], 0
        for char in text:
            depth += (char == '(') - (char == ')')
            if char == ',' and not depth:
                parts.append('')
            else:
                parts[-1] += char
        return parts

    def declared(self, text):
        """(name, type, count or None) of a field or an argument; several fields in one: see fields()."""
        text = ' '.join(text.split())
        if match := re.fullmatch(r'([\w ]+?)\s?(\**)\(\*(\w+)\)\((.*)\)', text):
            result = self.type_of(match[1], len(match[2]))
            return match[3], f'CFUNCTYPE({", ".join([result, *self.arguments(match[4])])})', None
        match = re.fullmatch(r'([\w ]+?)\s?((?:\*\s?(?:const)?\s?)*)\b(\w+)((?:, \w+)*)(?:\[(\w+)\])?', text)
        if not match:
            raise SystemExit(f'generate.py: {text!r} is not understood')
        names = match[3] + match[4]
        return names, self.type_of(match[1], match[2].count('*')), match[5]

    def fields(self, name):
        for names, kind, count in self.structs[name]:
            for field in names.split(', '):
                yield field, kind, count

    def read_function(self, text):
        match = re.fullmatch(r'([\w ]+?)\s?(\**)(\w+)\((.*)\)', text)
        if not match:
            raise SystemExit(f'generate.py: {text!r} is not understood')
        # An array argument is a pointer.
        types = []
        for part in self.split(match[4]):
            if part.strip() in ('', 'void'):
                continue
            _, kind, count = self.declared(part)
            types.append('c_char_p' if count and kind == 'c_char' else f'POINTER({kind})' if count else kind)
        self.functions[match[3]] = (self.type_of(match[1], len(match[2])), types)


def as_python(header):
    lines = ['"""Made by generate.py from client/shd.h: do not edit."""',
             'from ctypes import (CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_double, c_float, c_int,',
             '                    c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p)', '']
    lines += [f'{name} = {value!r}' for name, value in {**header.strings, **header.constants}.items()]
    lines += [f'\n\nclass {name}(Structure):\n    pass' for name in header.structs]
    lines.append('\n')
    for name in header.structs:
        lines.append(f'{name}._fields_ = [')
        for field, kind, count in header.fields(name):
            lines.append(f'    ({field!r}, {kind}{f" * {count}" if count else ""}),')
        lines.append(']')
    lines.append(f'STRUCTS = ({", ".join(header.structs)})')
    lines.append('FUNCTIONS = {')
    lines += [f'    {name!r}: ({result}, [{", ".join(types)}]),'
              for name, (result, types) in header.functions.items()]
    lines.append('}')
    return lines


def as_c(header):
    lines = ['/* Made by generate.py from client/shd.h. */', '#include <stdio.h>', '#include "client/shd.h"',
             'int main(void)', '{']
    for name in header.structs:
        lines.append(f'    printf("{name} %zu\\n", sizeof(struct {name}));')
        lines += [f'    printf("{name}.{field} %zu %zu\\n", offsetof(struct {name}, {field}), '
                  f'sizeof(((struct {name} *)0)->{field}));' for field, _, _ in header.fields(name)]
    return [*lines, '    return 0;', '}']


def main():
    if len(sys.argv) != 4 or sys.argv[2] not in ('python', 'c'):
        raise SystemExit(__doc__)
    header = Header(read(sys.argv[1]))
    with open(sys.argv[3], 'w', encoding='utf-8') as file:
        file.write('\n'.join(as_python(header) if sys.argv[2] == 'python' else as_c(header)) + '\n')


if __name__ == '__main__':
    main()
