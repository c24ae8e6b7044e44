/* Words of people: command lines, names in policies, addresses. Input: words, each up to a NUL. */
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>

#include "client/plan/plan.h"
#include "client/session/address.h"
#include "proto/base/dtype.h"
#include "proto/base/flags.h"

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
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

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
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
