/* A checkpoint's directory: how tensors are cut into leaves, shardd.json, and its small files. */
#include "proto/files/ckpt.h"

#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/files/ckpt_info.h"
#include "proto/wire/wire.h"
#include "tests/lib/proto_util.h"

/* Tensors that begin and end inside blocks, of less than a block and of several. */
static const char cut[] = "{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'},'units':["
                          "{'name':'u','tensors':[{'name':'a','shape':[1000]},"
                          "{'name':'b','shape':[5000]},{'name':'c','shape':[1]},"
                          "{'name':'d','shape':[2048]}]},"
                          "{'name':'f','tensors':[{'name':'e','shape':[4097],"
                          "'trainable':false}]}]}";

static struct spec *cut_spec(void)
{
    return parse(quoted("%s", cut));
}

TEST(leaves_are_the_blocks_that_a_tensor_touches)
{
    struct spec *s = cut_spec();
    struct shd_err e = { 0 };
    /* a: elements 0 to 999; b: 1024 to 6023; c: 6048; d: 6080 to 8127; e: 0 to 4096 */
    static const uint64_t leaves[] = { 1, 3, 1, 2, 3 };
    static const uint32_t arrays[] = { 3, 3, 3, 3, 1 };
    uint64_t *first = NULL, total = 0, at = 0;
    EXPECT_OK(ckpt_leaf_index(s, &first, &total, &e), &e);
    for (uint32_t t = 0; t < s->tensor_count; t++) {
        EXPECT_EQ(ckpt_leaf_count(&s->tensors[t]), leaves[t]);
        EXPECT_EQ(ckpt_arrays(s, &s->tensors[t]), arrays[t]);
        EXPECT_EQ(first[t], at);
        at += leaves[t] * arrays[t];
    }
    EXPECT_EQ(total, at);
    free(first);
    uint64_t begin = 0;
    EXPECT_EQ(ckpt_leaf_elems(&s->tensors[1], 0, 1, &begin), 1024);
    EXPECT_EQ(begin, 1024);
    EXPECT_EQ(ckpt_leaf_elems(&s->tensors[1], 1, 1, &begin), 2048);
    EXPECT_EQ(begin, 2048);
    EXPECT_EQ(ckpt_leaf_elems(&s->tensors[1], 2, 1, &begin), 6024 - 4096);
    EXPECT_EQ(ckpt_leaf_elems(&s->tensors[1], 0, 3, &begin), 5000);
    EXPECT_EQ(ckpt_leaf_elems(&s->tensors[4], 2, 1, &begin), 1);
    EXPECT_EQ(begin, 4096);
    spec_free(s);
}

/* Leaves of a tensor of x, formed at once and by owners. */
static void expect_same_leaves(const struct spec *s, uint32_t tensor, uint32_t owners,
                               const float *x)
{
    const struct spec_tensor *t = &s->tensors[tensor];
    const uint64_t count = ckpt_leaf_count(t), elems = s->units[t->unit].elems;
    struct shd_err e = { 0 };
    struct ckpt_hasher *hasher = NULL;
    uint8_t whole[8][CKPT_LEAF_BYTES] = { 0 }, parts[8][CKPT_LEAF_BYTES] = { 0 };
    struct ckpt_part p;
    CHECK(count <= 8);
    EXPECT_OK(ckpt_hasher_new(&hasher, &e), &e);
    EXPECT(ckpt_part_of(s, tensor, (struct slice){ 0, elems }, &p));
    EXPECT(p.tensor == tensor && p.first_elem == t->offset_elems && p.elems == t->elems);
    EXPECT(p.first_leaf == 0 && p.leaves == count);
    EXPECT(ckpt_hash_part(hasher, &p, x + p.first_elem, whole));
    uint64_t next = t->offset_elems, leaf = 0;
    for (uint32_t o = 0; o < owners; o++) {
        if (!ckpt_part_of(s, tensor, layout_slice(elems, o, owners), &p))
            continue;
        EXPECT_EQ(p.first_elem, next);
        EXPECT_EQ(p.first_leaf, leaf);
        EXPECT(ckpt_hash_part(hasher, &p, x + p.first_elem, parts + leaf));
        next += p.elems;
        leaf += p.leaves;
    }
    EXPECT_EQ(next, t->offset_elems + t->elems);
    EXPECT_EQ(leaf, count);
    EXPECT(memcmp(whole, parts, sizeof whole) == 0);
    ckpt_hasher_free(hasher);
}

TEST(leaves_do_not_depend_on_who_owns_them)
{
    struct spec *s = cut_spec();
    static float x[10240];
    for (uint32_t i = 0; i < ARRAY_SIZE(x); i++)
        x[i] = (float)i;
    for (uint32_t owners = 1; owners < 7; owners++)
        for (uint32_t t = 0; t < s->tensor_count; t++)
            expect_same_leaves(s, t, owners, x);
    spec_free(s);
}

TEST(a_leaf_is_the_sha256_of_its_bytes)
{
    static const float x[2] = { 1, -2 }; /* 00 00 80 3f 00 00 00 c0 */
    static const uint8_t first[4] = { 0xee, 0x4a, 0xc7, 0x3c };
    struct ckpt_hasher *hasher = NULL;
    struct shd_err e = { 0 };
    uint8_t one[CKPT_LEAF_BYTES], again[CKPT_LEAF_BYTES];
    EXPECT_OK(ckpt_hasher_new(&hasher, &e), &e);
    EXPECT(ckpt_hash(hasher, x, 2, one) && ckpt_hash(hasher, x, 2, again));
    EXPECT(memcmp(one, again, sizeof one) == 0);
    EXPECT(memcmp(one, first, sizeof first) == 0);
    EXPECT(ckpt_hash(hasher, x, 1, again) && memcmp(one, again, sizeof one) != 0);
    ckpt_hasher_free(hasher);
}

/* -- Files ------------------------------------------------------------------------------------ */

static char dir[] = "/tmp/test_ckpt.XXXXXX";

static int dir_new(void)
{
    strcpy(dir + sizeof dir - 7, "XXXXXX");
    CHECK(mkdtemp(dir) != NULL);
    int fd = -1;
    struct shd_err e = { 0 };
    EXPECT_OK(ckpt_open_dir(dir, &fd, &e), &e);
    return fd;
}

static void dir_end(int fd)
{
    char command[64];
    close(fd);
    snprintf(command, sizeof command, "rm -r %s", dir);
    CHECK(system(command) == 0);
}

static void put_file(int dir_fd, const char *name, const char *text)
{
    const int fd = openat(dir_fd, name, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    const size_t bytes = strlen(text);
    CHECK(fd >= 0 && write(fd, text, bytes) == (ssize_t)bytes);
    close(fd);
}

static struct ckpt_info sample(void)
{
    static uint8_t blob[] = { 0, 1, 2, 254, 255 };
    static char spec[] = "{\"name\":\"m\"}";
    return (struct ckpt_info){
        .step = 7,
        .updates = 6,
        .digest = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        .spec_json = spec,
        .has_decision = true,
        .decision = { .skip = true,
                      .scale = 0.1f,
                      .lr = 0x1.23456789abcdep-10,
                      .loss_scale = 65536,
                      .good_steps = UINT32_MAX,
                      .divisor = 0x1.8p100,
                      .rate_count = 4,
                      .rates = { 0x1.23456789abcdep-10, (double)NAN, 0, 0.999 } },
        .blob = blob,
        .blob_bytes = sizeof blob,
        .time = 1700000000,
        .version = "1.2.3",
    };
}

/* As text, and the file "x" of 3 bytes that it names. */
static char *put_sample(int fd, const struct ckpt_info *info)
{
    static const struct ckpt_file files[] = { { "x", 3 } };
    struct shd_err e = { 0 };
    char *text = NULL;
    EXPECT_OK(ckpt_info_dump(info, files, 1, &text, &e), &e);
    put_file(fd, "x", "abc");
    put_file(fd, CKPT_INFO, text);
    return text;
}

/* As a build wrote it that knew no checksum: then what it says is looked at by itself. */
static void without_sum(char *text)
{
    char *sum = strstr(text, ",\n \"sha256\": \"");
    CHECK(sum != NULL);
    strcpy(sum, "\n}");
}

TEST(what_shardd_json_says_is_read_again)
{
    const int fd = dir_new();
    struct shd_err e = { 0 };
    const struct ckpt_info in = sample();
    struct ckpt_info out = { 0 };
    free(put_sample(fd, &in));
    EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
    EXPECT(out.step == 7 && out.updates == 6 && out.time == in.time && out.bytes == 3);
    EXPECT(out.summed);
    EXPECT_STR(out.digest, in.digest);
    EXPECT_STR(out.spec_json, in.spec_json);
    EXPECT_STR(out.version, in.version);
    EXPECT(out.has_decision && out.decision.skip && out.decision.scale == in.decision.scale);
    EXPECT(out.decision.lr == in.decision.lr && out.decision.loss_scale == 65536);
    EXPECT_EQ(out.decision.good_steps, UINT32_MAX);
    EXPECT(decision_equal(&out.decision, &in.decision));
    EXPECT_EQ(out.blob_bytes, in.blob_bytes);
    EXPECT(memcmp(out.blob, in.blob, in.blob_bytes) == 0);
    ckpt_info_deinit(&out);
    struct ckpt_info bare = in;
    bare.decision.divisor = 0; /* as an older build writes it */
    bare.decision.rate_count = 0;
    for (size_t bytes = 0; bytes < 5; bytes++) { /* each way base64 ends */
        bare.blob_bytes = bytes;
        free(put_sample(fd, &bare));
        EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
        EXPECT_EQ(out.blob_bytes, bytes);
        EXPECT(memcmp(out.blob, in.blob, bytes) == 0);
        EXPECT(decision_equal(&out.decision, &bare.decision));
        ckpt_info_deinit(&out);
    }
    bare.blob = NULL;
    bare.step = bare.updates = 0;
    bare.has_decision = false;
    free(put_sample(fd, &bare));
    EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
    EXPECT(!out.has_decision && out.blob == NULL && out.blob_bytes == 0);
    ckpt_info_deinit(&out);
    dir_end(fd);
}

/* In text, `from` becomes `to`. */
static void expect_refused(int fd, const char *text, const char *from, const char *to, int status,
                           const char *why)
{
    const char *at = strstr(text, from);
    if (at == NULL)
        FAIL("no '%s' in %s", from, text);
    char *changed = malloc(strlen(text) + strlen(to) + 1);
    CHECK(changed != NULL);
    sprintf(changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    put_file(fd, CKPT_INFO, changed);
    free(changed);
    struct shd_err e = { 0 };
    struct ckpt_info out = { .step = 77 };
    const int r = ckpt_info_read(fd, &out, &e);
    if (r != status || strstr(e.text, why) == NULL)
        FAIL("'%s' for '%s': got %s '%s'", to, from, status_name(r), e.text);
    EXPECT_EQ(out.step, 77);
}

TEST(a_shardd_json_that_lies_is_refused)
{
    const int fd = dir_new();
    const struct ckpt_info in = sample();
    char *text = put_sample(fd, &in);
    expect_refused(fd, text, "\"step\": 7", "\"step\": 8", SHD_EINVAL, "its own checksum");
    without_sum(text);
    expect_refused(fd, text, "\"format\": 1", "\"format\": 6", SHD_ENOTSUP, "format 6");
    expect_refused(fd, text, "\"format\": 1", "\"format\": 2", SHD_EINVAL, "'unit_updates'");
    expect_refused(fd, text, "\"step\": 7", "\"step\": -7", SHD_EINVAL, "'step'");
    expect_refused(fd, text, "\"step\": 7", "\"step\": 7.0", SHD_EINVAL, "'step'");
    expect_refused(fd, text, "\"step\": 7", "\"step\": 5", SHD_EINVAL, "'updates'");
    expect_refused(fd, text, "cdef\"", "cde\"", SHD_EINVAL, "'digest'");
    expect_refused(fd, text, "\"skip\": true", "\"skip\": 1", SHD_EINVAL, "'decision'");
    expect_refused(fd, text, "\"loss_scale\": 65536.0", "\"loss_scale\": -1", SHD_EINVAL,
                   "'decision'");
    expect_refused(fd, text, "\"scale\": 0.1", "\"scale\": 1e39, \"was\": 0.1", SHD_EINVAL,
                   "'decision'");
    expect_refused(fd, text, "4294967295", "4294967296", SHD_EINVAL, "'decision'");
    expect_refused(fd, text, "\"blob\": \"A", "\"blob\": \"", SHD_EINVAL, "'blob'");
    expect_refused(fd, text, "\"blob\": \"A", "\"blob\": \"*", SHD_EINVAL, "'blob'");
    expect_refused(fd, text, "\"spec\": {", "\"spec\": 1, \"was\": {", SHD_EINVAL, "'spec'");
    expect_refused(fd, text, "\"x\"", "\"../x\"", SHD_EINVAL, "'files'");
    expect_refused(fd, text, "\"x\"", "\"y\"", SHD_EIO, "'y'");
    expect_refused(fd, text, "\"bytes\": 3", "\"bytes\": 4", SHD_EINVAL, "has 3 bytes");
    expect_refused(fd, text, "\"step\": 7", "\"step\": 7, \"step\": 7", SHD_EINVAL, "line");
    expect_refused(fd, text, "\"step\": 7", "\"step\": 7, \"was\": 6", SHD_EINVAL, "more members");
    expect_refused(fd, text, "\"step\": 7", "\"step\": secret", SHD_EINVAL, "line");
    free(text);
    dir_end(fd);
}

/* Where units have counts of their own the file is of a format that older builds refuse. */
TEST(updates_of_units_are_read_again)
{
    const int fd = dir_new();
    struct shd_err e = { 0 };
    static char spec[] = "{\"name\":\"m\",\"units\":[{},{},{}]}";
    uint64_t counts[] = { 6, 0, 7 };
    struct ckpt_info in = sample(), out;
    in.spec_json = spec;
    char *text = put_sample(fd, &in);
    EXPECT(strstr(text, "unit_updates") == NULL && strstr(text, "\"format\": 1") != NULL);
    free(text);
    in.unit_updates = counts;
    in.unit_count = 3;
    text = put_sample(fd, &in);
    EXPECT_HAS(text, "\"format\": 2");
    EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
    EXPECT(out.unit_count == 3 && memcmp(out.unit_updates, counts, sizeof counts) == 0);
    ckpt_info_deinit(&out);
    free(text);
    counts[2] = 8; /* in 7 steps */
    free(put_sample(fd, &in));
    EXPECT_STATUS(ckpt_info_read(fd, &out, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'unit_updates'");
    counts[2] = 7;
    in.unit_count = 2;
    free(put_sample(fd, &in));
    EXPECT_STATUS(ckpt_info_read(fd, &out, &e), SHD_EINVAL);
    dir_end(fd);
}

/* So are what is set, alone or beside them. */
TEST(settings_are_read_again)
{
    const int fd = dir_new();
    struct shd_err e = { 0 };
    static char spec[] = "{\"name\":\"m\",\"units\":[{},{},{}]}",
                settings[] = "{\"now\":{\"a\":1},\"next\":null}";
    uint64_t counts[] = { 6, 0, 7 };
    struct ckpt_info in = sample(), out;
    in.spec_json = spec;
    in.settings_json = settings;
    for (int i = 0; i < 2; i++) {
        in.unit_updates = i == 1 ? counts : NULL;
        in.unit_count = i == 1 ? 3 : 0;
        char *text = put_sample(fd, &in);
        EXPECT_HAS(text, "\"format\": 3");
        EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
        EXPECT_STR(out.settings_json, settings);
        EXPECT_EQ(out.unit_count, in.unit_count);
        ckpt_info_deinit(&out);
        expect_refused(fd, text, "\"now\"", "\"sha256\"", SHD_EINVAL, "damaged");
        free(text);
    }
    dir_end(fd);
}

/* What builds of format 4 would leave out, or not know, is of a format that they refuse. */
TEST(micro_batches_and_eps_that_are_set_are_read_again)
{
    static char texts[][120] = {
        "{\"now\":{\"micro_batches\":{\"value\":8.0,\"from\":3}},\"next\":null}",
        "{\"now\":{},\"next\":{\"from\":9,\"settings\":{\"eps.a\":1e-06}}}",
        "{\"now\":{},\"next\":{\"from\":9,\"settings\":{}},\"later\":[]}",
        "{\"now\":{\"clip_norm\":{\"value\":8.0,\"from\":3}},\"next\":null}",
    };
    const int fd = dir_new();
    struct shd_err e = { 0 };
    struct ckpt_info in = sample(), out;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        in.settings_json = texts[i];
        char *text = put_sample(fd, &in);
        EXPECT_HAS(text, i == 3 ? "\"format\": 3" : "\"format\": 5");
        EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
        EXPECT(out.settings_json != NULL && out.decision.micro_batches == 0);
        ckpt_info_deinit(&out);
        free(text);
    }
    in.settings_json = NULL;
    in.decision.micro_batches = 8;
    in.decision.eps_count = 2;
    in.decision.eps[0] = (double)NAN;
    in.decision.eps[1] = 0.375;
    char *text = put_sample(fd, &in);
    EXPECT_HAS(text, "\"format\": 5");
    EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
    EXPECT(decision_equal(&in.decision, &out.decision));
    EXPECT(out.settings_json == NULL);
    ckpt_info_deinit(&out);
    without_sum(text);
    expect_refused(fd, text, "\"micro_batches\": 8", "\"micro_batches\": 4097", SHD_EINVAL,
                   "'decision'");
    expect_refused(fd, text, "\"micro_batches\": 8", "\"micro_batches\": -1", SHD_EINVAL,
                   "'decision'");
    expect_refused(fd, text, "0.375", "-1", SHD_EINVAL, "'decision'");
    expect_refused(fd, text, "0.375", "\"1\"", SHD_EINVAL, "'decision'");
    free(text);
    dir_end(fd);
}

TEST(a_shardd_json_without_a_checksum_is_read_and_told_apart)
{
    const int fd = dir_new();
    struct shd_err e = { 0 };
    const struct ckpt_info in = sample();
    struct ckpt_info out;
    char *text = put_sample(fd, &in);
    without_sum(text);
    put_file(fd, CKPT_INFO, text);
    EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
    EXPECT(!out.summed && out.step == 7);
    ckpt_info_deinit(&out);
    free(text);
    dir_end(fd);
}

TEST(a_blob_has_its_limit)
{
    const int fd = dir_new();
    struct ckpt_info info = sample(), out;
    struct shd_err e = { 0 };
    info.blob = calloc(1, WIRE_BLOB_BYTES_MAX);
    CHECK(info.blob != NULL);
    info.blob_bytes = WIRE_BLOB_BYTES_MAX;
    char *text = put_sample(fd, &info);
    EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
    EXPECT_EQ(out.blob_bytes, WIRE_BLOB_BYTES_MAX);
    ckpt_info_deinit(&out);
    without_sum(text);
    expect_refused(fd, text, "\"blob\": \"", "\"blob\": \"AAAA", SHD_EINVAL, "'blob'");
    free(text);
    free(info.blob);
    dir_end(fd);
}

/* A NUL is no end: the file is written by its length. */
static void put_bytes(int dir_fd, const char *text, size_t bytes)
{
    const int fd = openat(dir_fd, CKPT_INFO, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, text, bytes, 0) == (ssize_t)bytes);
    close(fd);
}

TEST(every_damaged_bit_of_shardd_json_is_refused)
{
    const int fd = dir_new();
    const struct ckpt_info in = sample();
    char *text = put_sample(fd, &in);
    const size_t bytes = strlen(text);
    for (size_t at = 0; at < bytes; at++)
        for (unsigned bit = 0; bit < 8; bit++) {
            const char was = text[at];
            struct shd_err e = { 0 };
            struct ckpt_info out = { 0 };
            text[at] = (char)((unsigned char)was ^ 1u << bit);
            put_bytes(fd, text, bytes);
            if (ckpt_info_read(fd, &out, &e) == SHD_OK)
                FAIL("bit %u of byte %zu may change: %s", bit, at, text);
            EXPECT_HAS(e.text, CKPT_INFO);
            text[at] = was;
        }
    put_bytes(fd, text, bytes);
    struct shd_err e = { 0 };
    struct ckpt_info out;
    EXPECT_OK(ckpt_info_read(fd, &out, &e), &e);
    ckpt_info_deinit(&out);
    free(text);
    dir_end(fd);
}

TEST(leaves_bin_is_as_long_as_the_spec_makes_it)
{
    const int fd = dir_new();
    struct spec *s = cut_spec();
    struct shd_err e = { 0 };
    uint64_t *first = NULL;
    int leaves = -1;
    const uint64_t bytes = (UINT64_C(7) * 3 + 3) * CKPT_LEAF_BYTES;
    EXPECT_STATUS(ckpt_open_leaves(fd, s, false, &leaves, &first, &e), SHD_EIO);
    put_file(fd, CKPT_LEAVES, "");
    const int file = openat(fd, CKPT_LEAVES, O_RDWR | O_CLOEXEC);
    for (int off = -1; off <= 1; off++) {
        CHECK(ftruncate(file, (off_t)bytes + off) == 0);
        EXPECT_STATUS(ckpt_open_leaves(fd, s, off == 0, &leaves, &first, &e),
                      off == 0 ? SHD_OK : SHD_EINVAL);
    }
    EXPECT(pwrite(leaves, "x", 1, 0) == 1);
    EXPECT_EQ(first[4], 21);
    close(leaves);
    close(file);
    free(first);
    spec_free(s);
    dir_end(fd);
}

TEST(text_is_read_within_its_limit_and_from_files_alone)
{
    const int fd = dir_new();
    struct shd_err e = { 0 };
    char *text = NULL;
    size_t bytes = 0;
    put_file(fd, "four", "abcd");
    EXPECT(symlinkat("four", fd, "link") == 0 && mkfifoat(fd, "fifo", 0600) == 0);
    EXPECT_OK(ckpt_read_text(fd, "four", false, 4, &text, &bytes, &e), &e);
    EXPECT_STR(text, "abcd");
    EXPECT_EQ(bytes, 4);
    free(text);
    EXPECT_STATUS(ckpt_read_text(fd, "four", false, 3, &text, &bytes, &e), SHD_ERANGE);
    EXPECT_STATUS(ckpt_read_text(fd, "link", false, 4, &text, &bytes, &e), SHD_EIO);
    EXPECT_OK(ckpt_read_text(fd, "link", true, 4, &text, &bytes, &e), &e);
    free(text);
    EXPECT_STATUS(ckpt_read_text(fd, "fifo", false, 4, &text, &bytes, &e), SHD_EINVAL);
    EXPECT_STATUS(ckpt_read_text(fd, ".", false, 4, &text, &bytes, &e), SHD_EINVAL);
    EXPECT_STATUS(ckpt_read_text(fd, "none", false, 4, &text, &bytes, &e), SHD_ENOENT);
    dir_end(fd);
}

TEST(reads_and_writes_are_whole_or_say_where_they_stopped)
{
    const int fd = dir_new();
    struct shd_err e = { 0 };
    char got[8] = "";
    put_file(fd, "f", "");
    const int file = openat(fd, "f", O_RDWR | O_CLOEXEC);
    EXPECT_OK(ckpt_pwrite(file, "abcdef", 6, 2, "f", &e), &e);
    EXPECT_OK(ckpt_pread(file, got, 4, 4, "f", &e), &e);
    EXPECT_STR(got, "cdef");
    EXPECT_STATUS(ckpt_pread(file, got, 4, 5, "f", &e), SHD_EIO);
    EXPECT_HAS(e.text, "'f' ends at byte 8, needed are 9");
    close(file);
    const int readonly = openat(fd, "f", O_RDONLY | O_CLOEXEC);
    EXPECT_STATUS(ckpt_pwrite(readonly, "x", 1, 0, "f", &e), SHD_EIO);
    EXPECT_HAS(e.text, "'f' at byte 0");
    close(readonly);
    dir_end(fd);
    EXPECT_STATUS(ckpt_open_dir(dir, &(int){ 0 }, &e), SHD_ENOENT);
}

TEST_MAIN()
