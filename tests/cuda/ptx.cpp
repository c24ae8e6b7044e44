/* See ptx.h. A kernel is parsed once, into instructions over a file of 64-bit registers: those it
 * declares, then its constants. A register holds its bits, zero beyond its width. */
#include "tests/cuda/ptx.h"

#include <ctype.h>
#include <fstream>
#include <map>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <vector>
#include <xmmintrin.h>

#include "proto/base/check.h"
#include "tests/cuda/emulate_device.h"

#define OPERANDS_MAX  6u
#define KERNELS_MAX   64u
#define REGISTERS_MAX 6144u   /* on a fiber's stack */
#define MXCSR_PLAIN   0x1f80u /* to nearest even, exceptions masked, denormals as they are */

alignas(128) unsigned char ptx_shared[PTX_SHARED_BYTES];

namespace
{

enum kind { SIMPLE, BRANCH, RETURN, OTHER };
enum special { TID_X, TID_Y, TID_Z, CTAID_X, CTAID_Y, CTAID_Z, NTID_X, NCTAID_X, ARGS, SPECIALS };

struct kernel;
struct instruction;
/* line: for messages about threads that are not all at the same place. */
typedef void (*other_op)(const struct kernel *k, const struct instruction &i, uint64_t *r,
                         int line);

struct instruction {
    enum kind kind;
    ptx_op op;      /* SIMPLE */
    other_op other; /* OTHER */
    /* Registers; of memory accesses the address's, then what is loaded or stored. */
    unsigned operand[OPERANDS_MAX];
    unsigned count;
    int64_t offset; /* of an address */
    unsigned bytes; /* of an element in memory */
    unsigned mode; /* of a shuffle: 'd'own, 'b'fly, 'u'p, 'i'dx; of an atomic: 'o'r, 'a'dd, 'm'ax */
    bool shared;   /* address in shared memory */
    int guard;     /* register, or -1 */
    bool guard_not;
    unsigned target; /* of a branch */
    std::string text;
};

struct kernel {
    struct emulate_kernel emulate;
    std::string name;
    std::vector<struct instruction> code;
    std::vector<uint64_t> registers; /* what a thread begins with: constants in place */
    std::map<std::string, unsigned> names;
    std::map<std::string, unsigned> labels;
    std::vector<std::pair<size_t, std::string>> jumps; /* to labels not seen yet */
    unsigned shared_bytes;
};

std::vector<struct kernel *> kernels;
std::map<std::string, uint64_t> globals; /* of the module: their addresses */

[[noreturn]] void wrong(const struct kernel *k, const std::string &what, const std::string &text)
{
    fprintf(stderr, "ptx: %s: %s: %s\n", k != nullptr ? k->name.c_str() : "?", what.c_str(),
            text.c_str());
    abort();
}

/* -- Running ----------------------------------------------------------------------------------- */

unsigned char *address(const struct kernel *k, const struct instruction &i, const uint64_t *r)
{
    const uint64_t at = r[i.operand[0]] + (uint64_t)i.offset;
    const unsigned total = i.bytes * (i.count - 1);
    if (at % total != 0)
        wrong(k, "an address that is not aligned", i.text);
    if (!i.shared)
        return reinterpret_cast<unsigned char *>(at);
    if (at > k->shared_bytes || total > k->shared_bytes - at)
        wrong(k, "beyond shared memory", i.text);
    return ptx_shared + at;
}

void load(const struct kernel *k, const struct instruction &i, uint64_t *r, int)
{
    const unsigned char *p = address(k, i, r);
    uint64_t x[4] = {};
    for (unsigned j = 1; j < i.count; j++)
        memcpy(&x[j - 1], p + (j - 1) * i.bytes, i.bytes);
    for (unsigned j = 1; j < i.count; j++)
        r[i.operand[j]] = x[j - 1];
}

void store(const struct kernel *k, const struct instruction &i, uint64_t *r, int)
{
    unsigned char *p = address(k, i, r);
    if (!i.shared)
        emulate_before_store(p, i.bytes * (i.count - 1));
    for (unsigned j = 1; j < i.count; j++)
        memcpy(p + (j - 1) * i.bytes, &r[i.operand[j]], i.bytes);
    if (!i.shared)
        emulate_event();
}

/* operand: old value, address, value. mode: of what it does. */
void atomic(const struct kernel *k, const struct instruction &i, uint64_t *r, int)
{
    const uint64_t at = r[i.operand[1]] + (uint64_t)i.offset, x = r[i.operand[2]];
    if (at % i.bytes != 0)
        wrong(k, "an address that is not aligned", i.text);
    unsigned char *p = reinterpret_cast<unsigned char *>(at);
    if (i.mode == 'o')
        emulate_before_or(p, x, i.bytes);
    uint64_t old = 0;
    memcpy(&old, p, i.bytes);
    r[i.operand[0]] = old;
    const uint64_t word = i.mode == 'o' ? old | x : i.mode == 'a' ? old + x : old > x ? old : x;
    memcpy(p, &word, i.bytes);
    emulate_event();
}

/* operand: value, whether it is another lane's, own value, lane operand, c, mask */
void shuffle(const struct kernel *k, const struct instruction &i, uint64_t *r, int line)
{
    const unsigned lane = emulate_lane(), by = (unsigned)r[i.operand[3]] & 31;
    const unsigned from = i.mode == 'd'   ? lane + by
                          : i.mode == 'u' ? lane - by
                          : i.mode == 'b' ? lane ^ by
                                          : by;
    if (r[i.operand[5]] != 0xffffffff || (i.mode != 'u' && r[i.operand[4]] != 31) ||
        (i.mode == 'u' && r[i.operand[4]] != 0))
        wrong(k, "a shuffle of less than a warp", i.text);
    const bool inside = from < 32;
    r[i.operand[0]] = (uint32_t)emulate_shuffle(r[i.operand[2]], inside ? from : lane,
                                                k->name.c_str(), line);
    r[i.operand[1]] = inside;
}

/* bytes: of a part */
void pack(const struct kernel *, const struct instruction &i, uint64_t *r, int)
{
    uint64_t x = 0;
    for (unsigned j = 1; j < i.count; j++)
        x |= r[i.operand[j]] << (j - 1) * i.bytes * 8;
    r[i.operand[0]] = x;
}

void unpack(const struct kernel *, const struct instruction &i, uint64_t *r, int)
{
    const uint64_t x = r[i.operand[i.count - 1]];
    for (unsigned j = 0; j + 1 < i.count; j++)
        r[i.operand[j]] = x >> j * i.bytes * 8 & ((UINT64_C(1) << i.bytes * 8) - 1);
}

void barrier(const struct kernel *k, const struct instruction &, uint64_t *, int line)
{
    emulate_barrier(k->name.c_str(), line);
}

void warp_barrier(const struct kernel *k, const struct instruction &, uint64_t *, int line)
{
    emulate_shuffle(0, 0, k->name.c_str(), line);
}

void fence(const struct kernel *k, const struct instruction &, uint64_t *, int line)
{
    emulate_fence(k->name.c_str(), line);
}

void run(const struct kernel *k, const void *args)
{
    _mm_setcsr(MXCSR_PLAIN);
    uint64_t r[REGISTERS_MAX];
    memcpy(r, k->registers.data(), k->registers.size() * sizeof *r);
    const uint64_t specials[SPECIALS] = {
        threadIdx.x, threadIdx.y, threadIdx.z,
        blockIdx.x,  blockIdx.y,  blockIdx.z,
        blockDim.x,  gridDim.x,   reinterpret_cast<uint64_t>(args),
    };
    memcpy(r, specials, sizeof specials);
    for (size_t at = 0;;) {
        const struct instruction &i = k->code[at++];
        if (i.guard >= 0 && (r[i.guard] != 0) == i.guard_not)
            continue;
        if (i.kind == SIMPLE)
            i.op(r, i.operand);
        else if (i.kind == BRANCH)
            at = i.target;
        else if (i.kind == RETURN)
            return;
        else
            i.other(k, i, r, (int)at);
    }
}

/* The emulation calls a kernel without saying which: one entry point for each. */
template <unsigned N> void run_nth(const void *args)
{
    run(kernels[N], args);
}
template <unsigned... N> struct entries {
    void (*const at[sizeof...(N)])(const void *) = { run_nth<N>... };
};
template <unsigned Count, unsigned... N> struct count_up : count_up<Count - 1, Count - 1, N...> {
};
template <unsigned... N> struct count_up<0, N...> : entries<N...> {
};
const count_up<KERNELS_MAX> entry_points;

/* -- Parsing ----------------------------------------------------------------------------------- */

unsigned add_register(struct kernel *k, uint64_t value)
{
    k->registers.push_back(value);
    if (k->registers.size() > REGISTERS_MAX)
        wrong(k, "more registers than there is room for", "");
    return (unsigned)k->registers.size() - 1;
}

/* A number as PTX writes it: decimal, 0x, 0f and 0d (the bits of a float). */
uint64_t number(const struct kernel *k, const std::string &word)
{
    char *end = nullptr;
    uint64_t value;
    if (word.compare(0, 2, "0f") == 0 || word.compare(0, 2, "0d") == 0)
        value = strtoull(word.c_str() + 2, &end, 16);
    else if (word[0] == '-')
        value = (uint64_t)strtoll(word.c_str(), &end, 0);
    else
        value = strtoull(word.c_str(), &end, 0);
    if (*end == 'U')
        end++;
    if (*end != '\0' || end == word.c_str())
        wrong(k, "an operand that is not known here", word);
    return value;
}

/* The register that holds an operand. bytes: of the operation, as constants are cut to. */
unsigned operand(struct kernel *k, const std::string &word, unsigned bytes)
{
    const std::map<std::string, unsigned>::const_iterator named = k->names.find(word);
    if (named != k->names.end())
        return named->second;
    if (word[0] == '%')
        wrong(k, "a register that is not declared", word);
    const uint64_t value = number(k, word);
    return add_register(k, bytes < 8 ? value & ((UINT64_C(1) << bytes * 8) - 1) : value);
}

/* "a, {b, c}, [d+4]" → a {b c} [d+4], braces and brackets kept. */
std::vector<std::string> split_operands(const std::string &text)
{
    std::vector<std::string> words(1);
    unsigned depth = 0;
    for (char c : text) {
        if (c == '{' || c == '[')
            depth++;
        if (c == '}' || c == ']')
            depth--;
        if (c == ',' && depth == 0)
            words.emplace_back();
        else if (!isspace((unsigned char)c))
            words.back() += c;
    }
    if (words.back().empty())
        words.pop_back();
    return words;
}

std::vector<std::string> split(const std::string &text, char at)
{
    std::vector<std::string> words(1);
    for (char c : text)
        if (c == at)
            words.emplace_back();
        else
            words.back() += c;
    return words;
}

std::vector<std::string> parts_of(const std::string &word)
{
    return word[0] == '{' ? split(word.substr(1, word.size() - 2), ',')
                          : std::vector<std::string>(1, word);
}

unsigned type_bytes(const struct kernel *k, const std::string &type, const std::string &text)
{
    if (type == "pred")
        return 1;
    const unsigned bits = type.size() > 1 ? (unsigned)atoi(type.c_str() + 1) : 0;
    if (bits != 8 && bits != 16 && bits != 32 && bits != 64)
        wrong(k, "a type that is not known here", text);
    return bits / 8;
}

void add_operand(struct kernel *k, struct instruction *i, const std::string &word, unsigned bytes)
{
    if (i->count == OPERANDS_MAX)
        wrong(k, "too many operands", i->text);
    i->operand[i->count++] = operand(k, word, bytes);
}

/* "[%rd1+8]": the address's register, and the offset. */
void add_address(struct kernel *k, struct instruction *i, const std::string &word)
{
    if (word.size() < 3 || word[0] != '[')
        wrong(k, "no address", i->text);
    const std::string inside = word.substr(1, word.size() - 2);
    const size_t plus = inside.find('+');
    add_operand(k, i, inside.substr(0, plus), 8);
    i->offset = plus == std::string::npos ? 0 : (int64_t)number(k, inside.substr(plus + 1));
}

/* ld and st: .space [.cs] [.vN] .type; any other word is refused. */
void parse_access(struct kernel *k, struct instruction *i, const std::vector<std::string> &name,
                  const std::vector<std::string> &words)
{
    const bool loads = name[0] == "ld";
    i->other = loads ? load : store;
    i->shared = name[1] == "shared";
    unsigned elems = 1;
    for (size_t w = 1; w + 1 < name.size(); w++) {
        if (name[w] == "v2" || name[w] == "v4")
            elems = name[w] == "v2" ? 2 : 4;
        else if (name[w] != "param" && name[w] != "global" && name[w] != "shared" &&
                 name[w] != "cs" && name[w] != "nc")
            wrong(k, "an access that is not known here", i->text);
    }
    i->bytes = type_bytes(k, name.back(), i->text);
    if (words.size() != 2)
        wrong(k, "not two operands", i->text);
    add_address(k, i, words[loads ? 1 : 0]);
    const std::vector<std::string> parts = parts_of(words[loads ? 0 : 1]);
    if (parts.size() != elems)
        wrong(k, "another number of elements", i->text);
    for (const std::string &part : parts)
        add_operand(k, i, part, i->bytes);
}

void parse_shuffle(struct kernel *k, struct instruction *i, const std::vector<std::string> &name,
                   const std::vector<std::string> &words)
{
    const std::vector<std::string> to = split(words.empty() ? "" : words[0], '|');
    if (name.size() != 4 || name[1] != "sync" || name[3] != "b32" || to.size() != 2 ||
        words.size() != 5)
        wrong(k, "a shuffle that is not known here", i->text);
    i->other = shuffle;
    i->mode = (unsigned char)name[2][0];
    add_operand(k, i, to[0], 4);
    add_operand(k, i, to[1], 1);
    for (size_t w = 1; w < words.size(); w++)
        add_operand(k, i, words[w], 4);
}

/* atom.global.or.b64 and the like; unsigned ones only. */
void parse_atomic(struct kernel *k, struct instruction *i, const std::vector<std::string> &name,
                  const std::vector<std::string> &words)
{
    if (name.size() != 4 || name[1] != "global" || name[3][0] == 's' || words.size() != 3 ||
        (name[2] != "or" && name[2] != "add" && name[2] != "max"))
        wrong(k, "an atomic that is not known here", i->text);
    i->other = atomic;
    i->mode = (unsigned char)name[2][0];
    i->bytes = type_bytes(k, name[3], i->text);
    add_operand(k, i, words[0], i->bytes);
    add_address(k, i, words[1]);
    add_operand(k, i, words[2], i->bytes);
}

/* mov with {a, b} on one side. */
void parse_pack(struct kernel *k, struct instruction *i, const std::vector<std::string> &name,
                const std::vector<std::string> &words)
{
    i->other = words[0][0] == '{' ? unpack : pack;
    for (const std::string &word : words)
        for (const std::string &part : parts_of(word))
            add_operand(k, i, part, 8);
    i->bytes = type_bytes(k, name.back(), i->text) / (i->count - 1);
}

void parse_simple(struct kernel *k, struct instruction *i, const std::string &mnemonic,
                  const std::vector<std::string> &name, const std::vector<std::string> &words)
{
    i->kind = SIMPLE;
    i->op = ptx_op_find(mnemonic.c_str());
    if (i->op == nullptr)
        wrong(k, "an instruction that is not known here", i->text);
    const unsigned bytes = type_bytes(k, name.back(), i->text);
    for (const std::string &word : words)
        add_operand(k, i, word, bytes);
}

/* "@!%p1 bra $L1" without the guard → "bra", "$L1". */
std::string take_guard(struct kernel *k, struct instruction *i, const std::string &text)
{
    i->guard = -1;
    if (text[0] != '@')
        return text;
    const size_t space = text.find(' ');
    i->guard_not = text[1] == '!';
    i->guard = (int)operand(k, text.substr(i->guard_not ? 2 : 1, space - (i->guard_not ? 2 : 1)),
                            1);
    return text.substr(space + 1);
}

void parse_instruction(struct kernel *k, const std::string &statement)
{
    struct instruction i = instruction();
    i.kind = OTHER;
    i.text = statement;
    const std::string text = take_guard(k, &i, statement);
    const size_t end = text.find(' ');
    const std::string mnemonic = text.substr(0, end);
    const std::vector<std::string> name = split(mnemonic, '.');
    const std::vector<std::string> words = split_operands(
        end == std::string::npos ? "" : text.substr(end + 1));
    if (name[0] == "bra") {
        i.kind = BRANCH;
        k->jumps.emplace_back(k->code.size(), words[0]);
    } else if (mnemonic == "ret") {
        i.kind = RETURN;
    } else if (mnemonic == "bar.sync") {
        i.other = barrier;
    } else if (mnemonic == "bar.warp.sync" && words.size() == 1 && words[0] == "-1") {
        i.other = warp_barrier;
    } else if (mnemonic == "membar.gl") {
        i.other = fence;
    } else if (name[0] == "shfl") {
        parse_shuffle(k, &i, name, words);
    } else if (name[0] == "atom") {
        parse_atomic(k, &i, name, words);
    } else if (name[0] == "ld" || name[0] == "st") {
        parse_access(k, &i, name, words);
    } else if (name[0] == "mov" && statement.find('{') != std::string::npos) {
        parse_pack(k, &i, name, words);
    } else {
        parse_simple(k, &i, mnemonic, name, words);
    }
    k->code.push_back(i);
}

/* ".reg .b32 %r<9>": %r0 to %r8; ".reg .b64 %tmp". */
void parse_registers(struct kernel *k, const std::string &text)
{
    const size_t at = text.find('%'), bracket = text.find('<');
    if (bracket == std::string::npos) {
        k->names[text.substr(at)] = add_register(k, 0);
        return;
    }
    const std::string stem = text.substr(at, bracket - at);
    const unsigned count = (unsigned)atoi(text.c_str() + bracket + 1);
    for (unsigned n = 0; n < count; n++)
        k->names[stem + std::to_string(n)] = add_register(k, 0);
}

/* ".shared .align 16 .b8 name[8192]": its name is its offset. */
void parse_shared(struct kernel *k, const std::string &text)
{
    const size_t open = text.find('['), align = text.find(".align ");
    const size_t space = text.rfind(' ', open);
    if (open == std::string::npos || align == std::string::npos ||
        text.find(".b8 ") == std::string::npos)
        wrong(k, "shared memory that is not known here", text);
    const unsigned to = (unsigned)atoi(text.c_str() + align + 7);
    k->shared_bytes = (k->shared_bytes + to - 1) / to * to;
    k->names[text.substr(space + 1, open - space - 1)] = add_register(k, k->shared_bytes);
    k->shared_bytes += (unsigned)atoi(text.c_str() + open + 1);
    if (k->shared_bytes > PTX_SHARED_BYTES)
        wrong(k, "more shared memory than there is", text);
}

void parse_statement(struct kernel *k, const std::string &text)
{
    if (text.compare(0, 4, ".reg") == 0)
        parse_registers(k, text);
    else if (text.compare(0, 7, ".shared") == 0)
        parse_shared(k, text);
    else if (text.compare(0, 7, ".pragma") != 0)
        parse_instruction(k, text);
}

/* Body, without the outer braces: statements end with ';', labels with ':'; braces around a few
 * statements make no difference, for no name is used twice. */
void parse_body(struct kernel *k, const std::string &body)
{
    std::string text;
    for (char c : body) {
        if (isspace((unsigned char)c))
            c = ' ';
        if (text.empty() && (c == ' ' || c == '{' || c == '}'))
            continue;
        if (c == ';') {
            parse_statement(k, text);
            text.clear();
        } else if (c == ':' && text[0] == '$') {
            k->labels[text] = (unsigned)k->code.size();
            text.clear();
        } else {
            text += c;
        }
    }
    for (const std::pair<size_t, std::string> &jump : k->jumps) {
        const std::map<std::string, unsigned>::const_iterator label = k->labels.find(jump.second);
        if (label == k->labels.end())
            wrong(k, "a label that is not there", jump.second);
        k->code[jump.first].target = label->second;
    }
}

void name_specials(struct kernel *k, const std::string &param)
{
    static const char *const names[SPECIALS] = { "%tid.x",   "%tid.y",    "%tid.z",
                                                 "%ctaid.x", "%ctaid.y",  "%ctaid.z",
                                                 "%ntid.x",  "%nctaid.x", nullptr };
    for (unsigned s = 0; s < SPECIALS; s++)
        k->names[s == ARGS ? param : names[s]] = add_register(k, 0);
}

/* From behind ".visible .entry ": "name( .param … name_param_0[80] ) … { body }". */
size_t parse_kernel(const std::string &text, size_t at)
{
    if (kernels.size() == KERNELS_MAX)
        wrong(nullptr, "more kernels than there is room for", "");
    struct kernel *k = new struct kernel(); /* as long as the process */
    const size_t paren = text.find('(', at), open = text.find('{', paren);
    k->name = text.substr(at, paren - at);
    const std::string head = text.substr(paren, open - paren);
    const size_t bracket = head.find('['), space = head.rfind(' ', bracket);
    const size_t threads = head.find(".maxntid ");
    if (bracket == std::string::npos || threads == std::string::npos)
        wrong(k, "not one array of parameters, or no limit of threads", head);
    name_specials(k, head.substr(space + 1, bracket - space - 1));
    for (const std::pair<const std::string, uint64_t> &global : globals)
        k->names[global.first] = add_register(k, global.second);
    size_t end = open + 1;
    for (unsigned depth = 1; depth > 0; end++) {
        CHECK(end < text.size());
        depth += text[end] == '{' ? 1 : text[end] == '}' ? -1 : 0;
    }
    parse_body(k, text.substr(open + 1, end - open - 2));
    k->emulate = { k->name.c_str(), (size_t)atoi(head.c_str() + bracket + 1),
                   (unsigned)atoi(head.c_str() + threads + 9), entry_points.at[kernels.size()],
                   nullptr };
    kernels.push_back(k);
    emulate_register(&k->emulate, ptx_shared, ptx_shared + sizeof ptx_shared);
    return end;
}

/* From behind ".global .align ": "4 .b8 name[256] = {1, 2, ...};", which kernels read alone. */
void parse_global(const std::string &text, size_t at)
{
    const size_t open = text.find('[', at), space = text.rfind(' ', open);
    unsigned char *byte = (unsigned char *)calloc(1, (size_t)atoi(text.c_str() + open + 1));
    globals[text.substr(space + 1, open - space - 1)] = (uint64_t)byte; /* as long as the process */
    for (const std::string &word : split(text.substr(text.find('{', at) + 1), ','))
        *byte++ = (unsigned char)atoi(word.c_str());
}

/* Without comments, which are lines' ends. */
std::string read_file(const std::string &path)
{
    std::ifstream file(path);
    if (!file)
        wrong(nullptr, "EMULATE_PTX names a file that cannot be read", path);
    std::string text, line;
    while (std::getline(file, line))
        text += line.substr(0, line.find("//")) + '\n';
    return text;
}

void load_files()
{
    const char *files = getenv("EMULATE_PTX");
    if (files == nullptr)
        return;
    for (const std::string &path : split(files, ':')) {
        const std::string text = read_file(path);
        static const std::string entry = ".visible .entry ", global = ".global .align ";
        for (size_t g = text.find(global); g != std::string::npos; g = text.find(global, g + 1))
            parse_global(text.substr(g, text.find(';', g) - g), global.size());
        size_t at = text.find(entry);
        if (at == std::string::npos)
            wrong(nullptr, "no kernel in", path);
        while (at != std::string::npos)
            at = text.find(entry, parse_kernel(text, at + entry.size()));
    }
}

} /* namespace */

const struct emulate_kernel *ptx_find(const char *name)
{
    static std::once_flag once;
    std::call_once(once, load_files);
    for (const struct kernel *k : kernels)
        if (k->name == name)
            return &k->emulate;
    return nullptr;
}
