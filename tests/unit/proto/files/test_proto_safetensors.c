/* safetensors files: what is written is read, and nothing that a file claims is believed. */
#include "proto/files/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/lib/proto_util.h"

static int file_of(const void *data, size_t bytes)
{
    const int fd = memfd_create("safetensors", MFD_CLOEXEC);
    CHECK(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes);
    return fd;
}

/* Places, sizes and order as any reader of the file relies on them. */
static void expect_sound(const struct safetensors *f, uint64_t file_bytes)
{
    for (uint32_t i = 0; i < f->count; i++) {
        const struct safetensors_tensor *t = &f->tensors[i];
        uint64_t elems = 1;
        for (uint32_t d = 0; d < t->rank; d++)
            elems *= t->shape[d];
        EXPECT_EQ(t->elems, elems);
        EXPECT_EQ(t->bytes, elems * safetensors_dtype_bytes(t->dtype));
        EXPECT(t->at_bytes >= 8 && t->at_bytes <= file_bytes);
        EXPECT(t->bytes <= file_bytes - t->at_bytes);
        EXPECT(i == 0 || strcmp(f->tensors[i - 1].name, t->name) < 0);
        for (uint32_t k = 0; k < i; k++) {
            const struct safetensors_tensor *o = &f->tensors[k];
            EXPECT(o->at_bytes + o->bytes <= t->at_bytes || t->at_bytes + t->bytes <= o->at_bytes);
        }
    }
}

static struct safetensors_header sample(void)
{
    struct safetensors_tensor tensors[] = {
        { .name = "b", .dtype = SAFETENSORS_F32, .rank = 2, .shape = { 3, 5 } },
        { .name = "a", .dtype = SAFETENSORS_BF16, .rank = 1, .shape = { 7 } },
        { .name = "scalar", .dtype = SAFETENSORS_F64 },
        { .name = "none", .dtype = SAFETENSORS_I8, .rank = 2, .shape = { 4, 0 } },
    };
    struct shd_err e = { 0 };
    struct safetensors_header h = { 0 };
    EXPECT_OK(safetensors_header(tensors, ARRAY_SIZE(tensors), &h, &e), &e);
    EXPECT_EQ(h.bytes % SAFETENSORS_DATA_ALIGN, 0);
    EXPECT_EQ(tensors[0].at_bytes, h.bytes);
    EXPECT_EQ(tensors[1].at_bytes, h.bytes + 60);
    EXPECT_EQ(tensors[2].at_bytes, h.bytes + 74);
    EXPECT_EQ(h.file_bytes, h.bytes + 82);
    return h;
}

TEST(what_is_written_is_read)
{
    struct safetensors_header h = sample();
    struct shd_err e = { 0 };
    struct safetensors *f = NULL;
    const int fd = file_of(h.data, h.bytes);
    CHECK(ftruncate(fd, (off_t)h.file_bytes) == 0);
    EXPECT_OK(safetensors_read(fd, &f, &e), &e);
    EXPECT_EQ(f->count, 4);
    expect_sound(f, h.file_bytes);
    const struct safetensors_tensor *b = safetensors_find(f, "b");
    EXPECT(b != NULL && b->dtype == SAFETENSORS_F32 && b->rank == 2 && b->shape[1] == 5);
    EXPECT_EQ(b->at_bytes, h.bytes);
    EXPECT_EQ(safetensors_find(f, "scalar")->at_bytes, h.bytes + 74);
    EXPECT_EQ(safetensors_find(f, "scalar")->elems, 1);
    EXPECT_EQ(safetensors_find(f, "none")->elems, 0);
    EXPECT(safetensors_find(f, "c") == NULL && safetensors_find(f, "") == NULL);
    safetensors_free(f);
    close(fd);
    free(h.data);
}

TEST(a_file_that_is_cut_is_an_error_at_every_length)
{
    struct safetensors_header h = sample();
    const int fd = file_of(h.data, h.bytes);
    for (uint64_t bytes = h.file_bytes; bytes-- > 0; bytes -= bytes > h.bytes ? 0 : bytes % 61) {
        struct shd_err e = { 0 };
        struct safetensors *f = NULL;
        CHECK(ftruncate(fd, (off_t)bytes) == 0);
        EXPECT_STATUS(safetensors_read(fd, &f, &e), bytes < 8 ? SHD_EINVAL : SHD_ERANGE);
        EXPECT(f == NULL);
        if (bytes == h.file_bytes - 1)
            EXPECT_HAS(e.text, "tensor 'scalar' ends at byte 82 of 81: the file is cut");
        if (bytes == 0)
            break;
    }
    close(fd);
    free(h.data);
}

TEST(a_damaged_byte_is_an_error_or_leaves_a_sound_header)
{
    struct safetensors_header h = sample();
    uint32_t refused = 0, read = 0;
    for (uint64_t at = 0; at < h.bytes && at < 420; at++)
        for (unsigned bit = 0; bit < 8; bit++) {
            struct shd_err e = { 0 };
            struct safetensors *f = NULL;
            h.data[at] = (char)(h.data[at] ^ 1 << bit);
            const int fd = file_of(h.data, h.bytes);
            CHECK(ftruncate(fd, (off_t)h.file_bytes) == 0);
            if (safetensors_read(fd, &f, &e) == SHD_OK) {
                expect_sound(f, h.file_bytes);
                safetensors_free(f);
                read++;
            } else {
                EXPECT(e.text[0] != '\0');
                refused++;
            }
            close(fd);
            h.data[at] = (char)(h.data[at] ^ 1 << bit);
        }
    EXPECT(refused > read && read > 0);
    free(h.data);
}

TEST(sizes_that_a_file_claims_are_bounded)
{
    static const struct {
        uint64_t claimed, file;
        int status;
    } cases[] = {
        { 0, 8, SHD_EINVAL },
        { 1, 8, SHD_ERANGE },
        { 3, 10, SHD_ERANGE },
        { UINT64_MAX, 4096, SHD_ERANGE },
        { UINT64_MAX - 7, 8, SHD_ERANGE },
        { SAFETENSORS_HEADER_BYTES_MAX + 1, UINT64_C(1) << 28, SHD_ERANGE },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct shd_err e = { 0 };
        struct safetensors *f = NULL;
        uint8_t size[8];
        for (unsigned k = 0; k < 8; k++)
            size[k] = (uint8_t)(cases[i].claimed >> (8 * k));
        const int fd = file_of(size, sizeof size);
        CHECK(ftruncate(fd, (off_t)cases[i].file) == 0);
        EXPECT_STATUS(safetensors_read(fd, &f, &e), cases[i].status);
        close(fd);
    }
    int ends[2];
    struct shd_err e = { 0 };
    struct safetensors *f = NULL;
    CHECK(pipe(ends) == 0);
    EXPECT_STATUS(safetensors_read(ends[0], &f, &e), SHD_EINVAL);
    close(ends[0]);
    close(ends[1]);
}

/* One tensor: dtype, shape and data_offsets, in a file with 100 bytes of data. */
static int parse_one(const char *tensor, struct safetensors **ret_file, struct shd_err *e)
{
    const char *json = quoted("{'t':{%s}}", tensor);
    return safetensors_parse(json, strlen(json), 100, ret_file, e);
}

TEST(headers_that_lie_are_refused_by_name)
{
    static const struct {
        const char *tensor;
        int status;
        const char *text;
    } cases[] = {
        { "'shape':[1],'data_offsets':[0,4]", SHD_EINVAL, "dtype" },
        { "'dtype':'F31','shape':[1],'data_offsets':[0,4]", SHD_EINVAL, "dtype" },
        { "'dtype':'F32','shape':4,'data_offsets':[0,4]", SHD_EINVAL, "shape" },
        { "'dtype':'F32','shape':[-1],'data_offsets':[0,4]", SHD_EINVAL, "shape" },
        { "'dtype':'F32','shape':[1.0],'data_offsets':[0,4]", SHD_EINVAL, "shape" },
        { "'dtype':'U8','shape':[1,1,1,1,1,1,1,1,1],'data_offsets':[0,1]", SHD_EINVAL, "shape" },
        { "'dtype':'U8','shape':[281474976710657],'data_offsets':[0,1]", SHD_EINVAL, "2^48" },
        { "'dtype':'U8','shape':[16777216,16777216,2],'data_offsets':[0,0]", SHD_EINVAL, "2^48" },
        { "'dtype':'U8','shape':[4294967296,0,4294967296],'data_offsets':[0,0]", SHD_EINVAL,
          "2^48" },
        { "'dtype':'F32','shape':[2],'data_offsets':[0,4]", SHD_EINVAL, "need 8 bytes" },
        { "'dtype':'F32','shape':[2],'data_offsets':[8,0]", SHD_EINVAL, "data_offsets 8 to 0" },
        { "'dtype':'F32','shape':[2],'data_offsets':[8]", SHD_EINVAL, "[begin, end]" },
        { "'dtype':'F32','shape':[2],'data_offsets':[-8,0]", SHD_EINVAL, "[begin, end]" },
        { "'dtype':'F32','shape':[2],'data_offsets':[96,104]", SHD_ERANGE, "104 of 100" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct shd_err e = { 0 };
        struct safetensors *f = NULL;
        const int r = parse_one(cases[i].tensor, &f, &e);
        EXPECT_HAS(e.text, cases[i].text);
        EXPECT_HAS(e.text, "tensor 't'");
        EXPECT_EQ(r, cases[i].status);
    }
}

TEST(limits_themselves_are_taken)
{
    struct shd_err e = { 0 };
    struct safetensors *f = NULL;
    EXPECT_OK(parse_one("'dtype':'U8','shape':[1,1,1,1,1,1,1,1],'data_offsets':[99,100]", &f, &e),
              &e);
    EXPECT_EQ(f->tensors[0].at_bytes, 99);
    safetensors_free(f);
    EXPECT_OK(parse_one("'dtype':'U8','shape':[0,281474976710656],'data_offsets':[7,7]", &f, &e),
              &e);
    EXPECT_EQ(f->tensors[0].elems, 0);
    safetensors_free(f);
    EXPECT_STATUS(parse_one("'dtype':'U8','shape':[281474976710656],'data_offsets':"
                            "[0,281474976710656]",
                            &f, &e),
                  SHD_ERANGE); /* a size to be believed, but for the file's */
    EXPECT_HAS(e.text, "cut");
}

TEST(tensors_do_not_overlap)
{
    static const char fmt[] = "{'__metadata__':{'x':'y'},"
                              "'z':{'dtype':'U8','shape':[10],'data_offsets':[0,10]},"
                              "'a':{'dtype':'U8','shape':[10],'data_offsets':[%d,%d]}}";
    struct shd_err e = { 0 };
    struct safetensors *f = NULL;
    const char *json = quoted(fmt, 9, 19);
    EXPECT_STATUS(safetensors_parse(json, strlen(json), 100, &f, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'z' and 'a' overlap");
    json = quoted(fmt, 10, 20);
    EXPECT_OK(safetensors_parse(json, strlen(json), 100, &f, &e), &e);
    EXPECT_EQ(f->count, 2);
    EXPECT_STR(f->tensors[0].name, "a");
    EXPECT_EQ(f->tensors[0].at_bytes, 10);
    safetensors_free(f);
    json = quoted("{'a':{'dtype':'U8','shape':[],'data_offsets':[0,1]},'a':1}");
    EXPECT_STATUS(safetensors_parse(json, strlen(json), 100, &f, &e), SHD_EINVAL);
    EXPECT_STATUS(safetensors_parse("[]", 2, 100, &f, &e), SHD_EINVAL);
}

TEST(numbers_become_fp32)
{
    static const uint16_t halves[] = { 0x0001, 0x03ff, 0x0400, 0x8000, 0x3555, 0x7bff, 0xfc00 };
    static const float want[] = { 0x1p-24f,    0x3ffp-24f, 0x1p-14f, -0.0f,
                                  0x1.554p-2f, 65504,      -INFINITY };
    float x[ARRAY_SIZE(halves)];
    safetensors_to_f32(SAFETENSORS_F16, halves, ARRAY_SIZE(halves), x);
    EXPECT(memcmp(x, want, sizeof x) == 0);
    static const uint16_t nan = 0x7e01;
    safetensors_to_f32(SAFETENSORS_F16, &nan, 1, x);
    EXPECT(isnan(x[0]));
    static const uint16_t bf16[] = { 0x3f80, 0x8001, 0xc2f7 };
    static const float wide[] = { 1, -0x1p-133f, -123.5f };
    safetensors_to_f32(SAFETENSORS_BF16, bf16, 3, x);
    EXPECT(memcmp(x, wide, sizeof wide) == 0);
    static const double doubles[] = { 1 + 0x1p-24, 1 + 0x1.8p-23, 1e300 };
    static const float rounded[] = { 1, 1 + 0x1p-22f, INFINITY };
    safetensors_to_f32(SAFETENSORS_F64, doubles, 3, x);
    EXPECT(memcmp(x, rounded, sizeof rounded) == 0);
}

/* -- Sets of files ---------------------------------------------------------------------------- */

static char dir[] = "/tmp/test_safeset.XXXXXX";

static void put_file(int dir_fd, const char *name, const char *text, size_t bytes)
{
    const int fd = openat(dir_fd, name, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, text, bytes) == (ssize_t)bytes);
    close(fd);
}

static void put_tensors(int dir_fd, const char *name, const char *tensor)
{
    struct safetensors_tensor t = { .name = tensor, .dtype = SAFETENSORS_U8 };
    struct safetensors_header h;
    struct shd_err e = { 0 };
    EXPECT_OK(safetensors_header(&t, 1, &h, &e), &e);
    char *whole = calloc(1, h.file_bytes);
    CHECK(whole != NULL);
    memcpy(whole, h.data, h.bytes);
    put_file(dir_fd, name, whole, h.file_bytes);
    free(whole);
    free(h.data);
}

static int dir_new(void)
{
    strcpy(dir + sizeof dir - 7, "XXXXXX");
    CHECK(mkdtemp(dir) != NULL);
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

static void dir_end(int fd)
{
    char command[64];
    close(fd);
    snprintf(command, sizeof command, "rm -r %s", dir);
    CHECK(system(command) == 0);
}

static void put_index(int dir_fd, const char *map)
{
    const char *text = quoted("{'weight_map':%s}", map);
    put_file(dir_fd, "model.safetensors.index.json", text, strlen(text));
}

TEST(a_set_is_the_files_of_its_index)
{
    const struct safeset_ask ask = { .stem = "model" };
    struct shd_err e = { 0 };
    struct safeset *set = NULL;
    struct safeset_place place;
    const int fd = dir_new();
    EXPECT_STATUS(safeset_open_at(fd, &ask, &set, &e), SHD_ENOENT);
    put_tensors(fd, "model.safetensors", "alone");
    EXPECT_OK(safeset_open_at(fd, &ask, &set, &e), &e);
    EXPECT(set->count == 1 && safeset_find(set, "alone", &place));
    safeset_free(set);
    put_tensors(fd, "one", "x");
    put_tensors(fd, "two", "y");
    put_index(fd, "{'y':'two','x':'one','gone':'one'}");
    EXPECT_OK(safeset_open_at(fd, &ask, &set, &e), &e);
    EXPECT_EQ(set->count, 2);
    EXPECT(safeset_find(set, "y", &place));
    EXPECT_STR(place.file->name, "two");
    EXPECT_STR(place.tensor->name, "y");
    EXPECT(!safeset_find(set, "gone", &place) && !safeset_find(set, "alone", &place));
    safeset_free(set);
    EXPECT_OK(safeset_open(dir, &set, &e), &e);
    EXPECT_EQ(set->count, 2);
    safeset_free(set);
    dir_end(fd);
}

TEST(an_index_names_files_beside_it)
{
    static const char *const bad[] = { "{'x':'../one'}", "{'x':'.one'}", "{'x':''}",
                                       "{'x':1}",        "{}",           "[]" };
    const struct safeset_ask ask = { .stem = "model" };
    struct shd_err e = { 0 };
    struct safeset *set = NULL;
    const int fd = dir_new();
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        put_index(fd, bad[i]);
        EXPECT_STATUS(safeset_open_at(fd, &ask, &set, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "model.safetensors.index.json: ");
    }
    put_index(fd, "{'x':'one'}");
    EXPECT_STATUS(safeset_open_at(fd, &ask, &set, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "'one'");
    EXPECT(mkfifoat(fd, "one", 0600) == 0);
    EXPECT_STATUS(safeset_open_at(fd, &ask, &set, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'one' is not a regular file");
    dir_end(fd);
}

TEST(links_are_followed_where_that_was_asked_for)
{
    struct safeset_ask ask = { .stem = "model" };
    struct shd_err e = { 0 };
    struct safeset *set = NULL;
    const int fd = dir_new();
    put_tensors(fd, "blob", "x");
    EXPECT(symlinkat("blob", fd, "model.safetensors") == 0);
    EXPECT_STATUS(safeset_open_at(fd, &ask, &set, &e), SHD_EIO);
    ask.links = true;
    EXPECT_OK(safeset_open_at(fd, &ask, &set, &e), &e);
    EXPECT((fcntl(set->files[0].fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
    safeset_free(set);
    ask.writable = true;
    EXPECT_OK(safeset_open_at(fd, &ask, &set, &e), &e);
    EXPECT((fcntl(set->files[0].fd, F_GETFL) & O_ACCMODE) == O_RDWR);
    safeset_free(set);
    char path[64];
    snprintf(path, sizeof path, "%s/blob", dir);
    EXPECT_OK(safeset_open(path, &set, &e), &e);
    EXPECT_EQ(set->count, 1);
    safeset_free(set);
    strcat(path, "2");
    EXPECT_STATUS(safeset_open(path, &set, &e), SHD_ENOENT);
    dir_end(fd);
}

TEST_MAIN()
