/* Words of people: command lines, names in policies, addresses. Input: words, each up to a NUL. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/run/keeper.h"
#include "client/plan/plan.h"
#include "client/plan/plan_check.h"
#include "client/session/address.h"
#include "proto/base/dtype.h"
#include "proto/base/flags.h"
#include "tests/fuzz/fuzz.h"

#define WORDS_MAX 12

static void parse_flags(int argc, char **argv)
{
    bool yes = false;
    uint32_t small = 5, any = 0;
    const char *text = "";
    uint64_t bytes = 1, whole = 2;
    double real = 0.5;
    struct flag_list list = { .count = 0 };
    const struct flag table[] = {
        { "verbose", 'v', FLAG_BOOL, NULL, "say more", &yes, 0, 0 },
        { "workers", 'w', FLAG_U32, "N", "how many", &small, 1, 64 },
        { "seed", 0, FLAG_U32, "N", "any", &any, 0, UINT32_MAX },
        { "address", 'a', FLAG_STRING, "A", "where", &text, 0, 0 },
        { "steps", 0, FLAG_U64, "N", "how many", &whole, 2, 0x1p53 },
        { "rate", 0, FLAG_REAL, "X", "how fast", &real, 0, 1 },
        { "data", 'd', FLAG_LIST, "PATH", "from", &list, 0, 0 },
        { "max-live-bytes", 0, FLAG_BYTES, "B", "hold at most", &bytes, 0, 0 },
    };
    const struct flags f = {
        .usage = "x", .about = "y", .table = table, .count = ARRAY_SIZE(table)
    };
    struct shd_err e = { 0 };
    int rest = 0;
    const enum flags_result r = flags_parse(&f, argc, argv, &rest, &e);
    CHECK(r == FLAGS_ERROR || r == FLAGS_HELP || (rest >= 1 && rest <= argc));
    if (r == FLAGS_ERROR)
        fuzz_check_refusal(e.code, &e);
    CHECK(small >= 1 && small <= 64 && bytes >= 1 && bytes <= UINT64_C(1) << 60);
    CHECK(whole >= 2 && whole <= UINT64_C(1) << 53 && real >= 0 && real <= 1);
    CHECK(list.count <= FLAG_LIST_MAX);
    CHECK(strlen(text) < SIZE_MAX / 2); /* it ends */
}

/* Addresses that name their daemons; others list a directory. */
static void parse_address(const char *word)
{
    struct address a = { 0 };
    struct shd_err e = { 0 };
    if (strchr(word, '?') == NULL && strcmp(word, "local:") != 0)
        return;
    const int r = address_parse(word, &a, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        return;
    }
    CHECK(a.local ? a.count == 0 : a.count >= 1 && a.dir != NULL);
    for (uint32_t i = 0; i < a.count; i++) {
        CHECK(a.devices[i][0] != 0 && strchr(a.devices[i], '/') == NULL);
        CHECK(address_compare(a.devices[i], a.devices[i]) == 0);
    }
    address_free(&a);
}

static int text_input(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1), *argv[WORDS_MAX + 2] = { NULL };
    char name[] = "plan";
    int argc = 1;
    CHECK(text != NULL);
    if (size > 0)
        memcpy(text, data, size);
    text[size] = 0;
    argv[0] = name;
    for (char *word = text; word <= text + size && argc <= WORDS_MAX; word += strlen(word) + 1)
        argv[argc++] = word;
    for (int i = 1; i < argc; i++) {
        const int strategy = plan_strategy_parse(argv[i]), prefetch = plan_prefetch_parse(argv[i]);
        CHECK(strategy < 0 ||
              strcmp(plan_strategy_name((enum plan_strategy)strategy), argv[i]) == 0);
        CHECK(prefetch < 0 ||
              strcmp(plan_prefetch_name((enum plan_backward_prefetch)prefetch), argv[i]) == 0);
        (void)dtype_parse(argv[i]);
        parse_address(argv[i]);
    }
    parse_flags(argc, argv);
    free(text);
    return 0;
}

static size_t text_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const char words[][48] = {
        "--workers\0002\0--verbose\0worker",
        "-w\0003\0-a\0/run/shardd?cpu0,cpu1\0--\0x",
        "--max-live-bytes=1.5GiB\0--seed=7",
        "--max-live-bytes\00024 GB\0--help",
        "zero3\0pre\0bf16\0local:",
        "/tmp/x?cpu10,cpu2,gpu0",
        "--wrokers\0002\0--address=relative?",
        "--seed\00099999999999999999999\0-h",
    };
    if (index >= ARRAY_SIZE(words) || bytes_max < sizeof words[0])
        return 0;
    size_t size = sizeof words[0];
    while (words[index][size - 1] == 0)
        size--;
    memcpy(buf, words[index], size);
    return size;
}

const struct fuzz_target fuzz_text = { "text", text_input, text_seed, NULL };

/* What daemons say to shardctl as their service manager: any datagrams with any descriptors. What
 * is kept is counted right, and nothing else stays open. Input: messages, each one byte (bits 0..1:
 * descriptors that come along, bits 2..3: of which file, bit 4: the next one's length has two
 * bytes), its length, its text. */

#define FILES        3
#define MESSAGES_MAX 64u

static int files[FILES], pair[2] = { -1, -1 };

/* In the place of shardctl's: what it would say is no finding. */
void ctl_say(const char *fmt, ...)
{
    (void)fmt;
}

static void start(void)
{
    const int on = 1;
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    CHECK(setsockopt(pair[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
    for (int i = 0; i < FILES; i++) {
        files[i] = memfd_create("kept", MFD_CLOEXEC);
        CHECK(files[i] >= 0);
    }
}

static void send_message(const uint8_t *text, size_t bytes, unsigned fds, unsigned which)
{
    int chosen[FUZZ_FDS_MAX];
    for (unsigned i = 0; i < FUZZ_FDS_MAX; i++)
        chosen[i] = files[(which + i) % FILES];
    fuzz_send(pair[0], text, bytes, chosen, fds);
}

static void check_kept(const struct kept *kept)
{
    struct shd_err e = { 0 };
    char *names;
    size_t bytes = 0;
    CHECK(kept->count <= KEPT_FDS_MAX && kept->names_bytes <= KEPT_NAMES_BYTES_MAX);
    for (uint32_t i = 0; i < kept->count; i++) {
        bytes += strlen(kept->names[i]) + 1;
        CHECK(kept->names[i][0] != 0 && strchr(kept->names[i], ':') == NULL);
        CHECK((fcntl(kept->fds[i], F_GETFD) & FD_CLOEXEC) != 0);
    }
    CHECK(bytes == kept->names_bytes);
    CHECK(keeper_names(kept, &names, &e) == SHD_OK);
    CHECK(strlen(names) + (kept->count > 0) == bytes);
    free(names);
}

static int keeper_input(const uint8_t *data, size_t size)
{
    static struct notify_message m;
    struct fuzz_in in = { data, size };
    struct kept kept = { 0 };
    if (pair[0] < 0)
        start();
    const int low = fuzz_lowest_free(pair[0]);
    for (unsigned n = 0; in.left > 0 && n < MESSAGES_MAX; n++) {
        const uint8_t how = fuzz_u8(&in);
        size_t bytes = (size_t)fuzz_bytes(&in, (how & 16) != 0 ? 2 : 1);
        if (bytes > in.left)
            bytes = in.left;
        send_message(in.at, bytes, how & 3, how >> 2 & 3);
        in.at += bytes;
        in.left -= bytes;
        if (notify_take(pair[1], /* lossy= */ false, &m) == NOTIFY_TAKEN) {
            CHECK(m.pid == getpid() && m.fd_count == (how & 3));
            keeper_take(&kept, &m, "cpu0");
            notify_close(&m);
        }
    }
    check_kept(&kept);
    keeper_free(&kept);
    CHECK(fuzz_lowest_free(pair[0]) == low);
    return 0;
}

static size_t keeper_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const char *const texts[] = {
        "FDSTORE=1\nFDNAME=m0123-state\nFDPOLL=0",
        "FDSTORE=1\nFDNAME=m0123-ledger",
        "FDSTOREREMOVE=1\nFDNAME=m0123-state",
        "READY=1\nSTATUS=Serving",
        "BARRIER=1",
        "FDSTORE=1",
    };
    size_t size = 0;
    if (index >= ARRAY_SIZE(texts))
        return 0;
    for (unsigned i = 0; i <= index; i++) { /* one more message each */
        const size_t bytes = strlen(texts[i]);
        if (size + 2 + bytes > bytes_max)
            return 0;
        buf[size] = (uint8_t)(i % 3 == 2 ? 0 : 1 | i << 2);
        buf[size + 1] = (uint8_t)bytes;
        memcpy(buf + size + 2, texts[i], bytes);
        size += 2 + bytes;
    }
    return size;
}

const struct fuzz_target fuzz_keeper = { "keeper", keeper_input, keeper_seed, NULL };

/* Plans of any units under any policy and any trace: refused, or what plan_check() agrees with.
 * Input: units with sizes, uses and frozenness, then the policy, then the trace. */

#define UNITS_MAX 9u
#define TRACE_MAX 12u

struct model {
    struct spec spec;
    struct spec_unit units[UNITS_MAX];
    struct spec_tensor tensors[UNITS_MAX];
    uint32_t order[TRACE_MAX];
};

static void model_read(struct model *m, struct fuzz_in *in)
{
    static char name[] = "u";
    *m = (struct model){ 0 };
    m->spec = (struct spec){ .name = name,
                             .unit_count = fuzz_below(in, UNITS_MAX) + 1,
                             .accumulate = fuzz_below(in, 5),
                             .publish = (enum shd_dtype)(fuzz_below(in, 3) + SHD_F32),
                             .grad_dtype = SHD_F32,
                             .units = m->units,
                             .tensors = m->tensors };
    m->spec.tensor_count = m->spec.unit_count;
    for (uint32_t u = 0; u < m->spec.unit_count; u++) {
        const uint8_t how = fuzz_u8(in), uses = fuzz_u8(in);
        m->units[u] = (struct spec_unit){
            .name = name, .first_tensor = u, .tensor_count = 1, .frozen = (how & 3) == 3
        };
        m->tensors[u] = (struct spec_tensor){ .unit = u, .elems = (uint64_t)(how >> 2) * 100 + 1 };
        for (uint32_t used = 0; used < u && used < 8; used++) /* earlier units, each once */
            if ((uses >> used & 1) != 0)
                m->units[u].uses[m->units[u].uses_count++] = used;
    }
}

static struct plan_policy policy_read(struct fuzz_in *in)
{
    const uint8_t how = fuzz_u8(in);
    return (struct plan_policy){ .strategy = (enum plan_strategy)(how % 8),
                                 .backward_prefetch = (enum plan_backward_prefetch)(how >> 3 & 3),
                                 .grad_dtype = (enum shd_dtype)(how >> 5),
                                 .forward_prefetch = fuzz_u8(in),
                                 .max_live_units = fuzz_u8(in) % 16,
                                 .max_live_bytes = fuzz_bytes(in, 2) };
}

static int plan_input(const uint8_t *data, size_t size)
{
    struct fuzz_in in = { data, size };
    struct shd_err e = { 0 };
    struct model m;
    struct plan plan;
    model_read(&m, &in);
    const struct plan_policy policy = policy_read(&in);
    const uint32_t micros = fuzz_below(&in, 9);
    const bool traced = (fuzz_u8(&in) & 1) != 0;
    struct plan_trace trace = { .forward = m.order };
    while (in.left > 0 && trace.count < TRACE_MAX)
        m.order[trace.count++] = fuzz_u8(&in) % (UNITS_MAX + 1); /* doubled and unknown ones too */
    const int r = plan_build(&m.spec, &policy, traced ? &trace : NULL, micros, &plan, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        return 0;
    }
    const int checked = plan_check(&plan, &m.spec, &policy, traced ? &trace : NULL, &e);
    if (checked != SHD_OK)
        fprintf(stderr, "%s\n", e.text);
    CHECK(checked == SHD_OK);
    plan_free(&plan);
    return 0;
}

static size_t plan_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    const size_t units = index % UNITS_MAX + 1;
    if (index >= 48 || bytes_max < 64)
        return 0;
    memset(buf, 0, 64);
    buf[0] = (uint8_t)(units - 1);
    buf[1] = (uint8_t)(index % 3);
    for (size_t u = 0; u < units; u++) {
        buf[3 + 2 * u] = (uint8_t)(index * 13 + u * 40);
        buf[4 + 2 * u] = (uint8_t)(index % 2 != 0 ? 1u << u % 8 : 0);
    }
    uint8_t *p = buf + 3 + 2 * units;
    p[0] = (uint8_t)(index % 4 | (index / 4 % 3) << 3);
    p[1] = (uint8_t)(index % 5);
    p[2] = index % 7 == 6 ? 3 : 0;
    p[5] = (uint8_t)(index % 3 == 0 ? 1 : index % 3 * 2);
    p[6] = index % 4 == 1;
    for (size_t u = 0; u < units; u++)
        p[7 + u] = (uint8_t)(units - 1 - u);
    return (size_t)(p - buf) + 7 + units;
}

const struct fuzz_target fuzz_plan = { "plan", plan_input, plan_seed, NULL };
