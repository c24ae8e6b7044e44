/* Checkpoints that are damaged, hostile, or have no room: an error that says what, nothing half
 * opened, nothing that was good harmed. */
#include "tests/lib/client_remote.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/files/safetensors.h"

static const char *step2 = "step-000000000002";

/* Two daemons with a toy of two steps, saved; then two without. */
static void save_toy(void)
{
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 2);
    save_ok(m, 0);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 2, NULL);
}

static void end(shd_session *s)
{
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

static void expect_no_restore(shd_session *s, int status, const char *text)
{
    struct shd_err e = { 0 };
    shd_model *m;
    const int r = shd_restore(s, ckpts, NULL, NULL, &e);
    EXPECT_HAS(e.text, text);
    EXPECT_EQ(r, status);
    EXPECT_STATUS(shd_model_attach(s, NULL, &m, &e), SHD_ENOENT);
}

static void expect_damaged(const char *text)
{
    struct shd_err e = { 0 };
    struct checkpoint_verified v;
    EXPECT_STATUS(checkpoint_verify(ckpts, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, text);
}

/* The first daemon's last warnings have it. The other's refusal may have ended the call. */
static bool warned(const char *text)
{
    struct http_reply status = http_get(&daemons, 0, "/status");
    const bool has = strstr(status.text, text) != NULL;
    free(status.text);
    return has;
}

/* -- Damage -------------------------------------------------------------------------------------
 */

TEST(a_damaged_byte_is_named)
{
    struct shd_err e = { 0 };
    save_toy();
    shd_session *s = attach(PATIENT_MS);
    flip_byte(step2, "model.safetensors", -1); /* of the last tensor, ln.w */
    expect_no_restore(s, SHD_EINVAL, "parameters of tensor 'ln.w', elements ");
    expect_damaged("tensor 'ln.w' in 'model.safetensors', elements ");
    flip_byte(step2, "model.safetensors", -1);
    flip_byte(step2, "optimizer-v.safetensors", 4096);
    expect_no_restore(s, SHD_EINVAL, "second moments of tensor 'wte', elements 0 to 2047");
    expect_damaged("'wte' in 'optimizer-v.safetensors', elements 0 to 2047, array 2");
    flip_byte(step2, "optimizer-v.safetensors", 4096);
    flip_byte(step2, "leaves.bin", 40);
    expect_no_restore(s, SHD_EINVAL, "one of them is damaged");
    expect_damaged("'wte'");
    flip_byte(step2, "leaves.bin", 40);
    EXPECT_OK(shd_restore(s, ckpts, NULL, NULL, &e), &e); /* nothing of the failures is left */
    EXPECT_STATUS(shd_restore(s, ckpts, NULL, NULL, &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "has model 'toy' open");
    EXPECT_SOON(warned("to go back to it, restore with --replace; nothing was opened"));
    end(s);
}

/* Run a command in the checkpoint's directory, expect the failure, put everything back. */
static void with_damage(shd_session *s, const char *command, int status, const char *text)
{
    EXPECT_EQ(shell("cp -a %s/%s %s/kept", ckpts, step2, ckpts), 0);
    EXPECT_EQ(shell("cd %s/%s && %s", ckpts, step2, command), 0);
    expect_no_restore(s, status, text);
    struct shd_err e = { 0 };
    struct checkpoint_verified v;
    EXPECT(checkpoint_verify(ckpts, &v, &e) != SHD_OK);
    EXPECT_EQ(shell("cd %s && rm -rf %s && mv kept %s", ckpts, step2, step2), 0);
}

/* A shardd.json as builds wrote it that knew no checksum, with a change. */
#define UNSUMMED "sed -i -z 's/,\\n \"sha256\": \"[0-9a-f]*\"//' shardd.json && "

TEST(broken_files_are_named)
{
    struct shd_err e = { 0 };
    save_toy();
    shd_session *s = attach(PATIENT_MS);
    with_damage(s, "sed -i 's/\"blob\": null/\"blob\": \"\"/' shardd.json", SHD_EINVAL,
                "not what its own checksum is of");
    with_damage(s, "rm model.safetensors", SHD_EIO, "model.safetensors");
    with_damage(s, "truncate -s -1 model.safetensors", SHD_EINVAL, "written were");
    with_damage(s, "mv leaves.bin x && ln -s x leaves.bin", SHD_EINVAL, "leaves.bin");
    with_damage(s, "rm leaves.bin && mkfifo leaves.bin", SHD_EINVAL, "leaves.bin");
    with_damage(s, "rm shardd.json && mkdir shardd.json", SHD_EINVAL, "not a regular file");
    with_damage(s, "echo '{' > shardd.json", SHD_EINVAL, "shardd.json");
    with_damage(s, "echo '[]' > shardd.json", SHD_EINVAL, "field 'format'");
    with_damage(s, UNSUMMED "sed -i 's/\"format\": 1/\"format\": 6/' shardd.json", SHD_ENOTSUP,
                "format 6");
    with_damage(s, UNSUMMED "sed -i 's/\"format\": 1/\"format\": 3/' shardd.json", SHD_EINVAL,
                "field 'settings'");
    with_damage(s, UNSUMMED "sed -i 's/\"format\": 1/\"format\": 2/' shardd.json", SHD_EINVAL,
                "'unit_updates'");
    with_damage(s, UNSUMMED "sed -i 's/\"step\": 2/\"step\": 3/' shardd.json", SHD_EINVAL,
                "digest of step 3");
    with_damage(s, UNSUMMED "sed -i 's/\"updates\": 2/\"updates\": 9/' shardd.json", SHD_EINVAL,
                "'updates'");
    with_damage(s, UNSUMMED "sed -i 's/\"scale\": /\"scale\": -/' shardd.json", SHD_EINVAL,
                "'decision'");
    with_damage(s, UNSUMMED "sed -i 's/\"blob\": null/\"blob\": \"AB\"/' shardd.json", SHD_EINVAL,
                "'blob'");
    with_damage(s, UNSUMMED "sed -i 's/\"h0.w\"/\"h0.x\"/' shardd.json", SHD_EINVAL, "damaged");
    with_damage(s,
                "sed -i 's/\"model.safetensors\"/\"..\\/model.safetensors\"/' "
                "model.safetensors.index.json",
                SHD_EINVAL, "written were");
    EXPECT_EQ(shell("echo ../../etc > %s/LATEST", ckpts), 0);
    expect_no_restore(s, SHD_EINVAL, "'LATEST' says '../../etc'");
    EXPECT_EQ(shell("rm %s/LATEST && ln -s %s/shardd.json %s/LATEST", ckpts, step2, ckpts), 0);
    expect_no_restore(s, SHD_EIO, "LATEST");
    EXPECT_EQ(shell("rm -r %s/LATEST %s/%s", ckpts, ckpts, step2), 0);
    expect_no_restore(s, SHD_ENOENT, "no checkpoint, and no directory with a latest one");
    EXPECT_STATUS(shd_restore(s, "/nowhere", NULL, NULL, &e), SHD_ENOENT);
    end(s);
}

TEST(a_changed_bit_of_shardd_json_is_refused_wherever_it_is)
{
    struct shd_err e = { 0 };
    struct checkpoint_verified v;
    struct stat st;
    char path[400];
    uint64_t rng = test_seed(11);
    save_toy();
    shd_session *s = attach(PATIENT_MS);
    snprintf(path, sizeof path, "%s/%s/shardd.json", ckpts, step2);
    EXPECT_EQ(stat(path, &st), 0);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    for (off_t at = 0; at < st.st_size; at++) {
        unsigned char was, damaged;
        EXPECT_EQ(pread(fd, &was, 1, at), 1);
        damaged = was ^ (unsigned char)(1u << test_random(&rng) % 8);
        EXPECT_EQ(pwrite(fd, &damaged, 1, at), 1);
        if (checkpoint_verify(ckpts, &v, &e) == SHD_OK ||
            shd_restore(s, ckpts, NULL, NULL, &e) == SHD_OK)
            FAIL("byte %jd may be %02x instead of %02x", (intmax_t)at, damaged, was);
        EXPECT_EQ(pwrite(fd, &was, 1, at), 1);
    }
    close(fd);
    EXPECT_OK(checkpoint_verify(ckpts, &v, &e), &e);
    EXPECT(v.summed);
    EXPECT_EQ(shell("cd %s/%s && " UNSUMMED "true", ckpts, step2), 0);
    EXPECT_OK(checkpoint_verify(ckpts, &v, &e), &e); /* an older build's */
    EXPECT(!v.summed);
    EXPECT_OK(shd_restore(s, ckpts, NULL, NULL, &e), &e);
    end(s);
}

/* What an index names must be files beside it. */
TEST(indexes_lead_nowhere_else)
{
    static const char *const names[] = { "../model.safetensors", "/etc/passwd", "", ".." };
    struct shd_err e = { 0 };
    make_ckpts();
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        struct safeset *set;
        EXPECT_EQ(shell("echo '{\"weight_map\":{\"w\":\"%s\"}}' > %s/model.safetensors.index.json",
                        names[i], ckpts),
                  0);
        EXPECT_STATUS(safeset_open(ckpts, &set, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "no name of a file here");
    }
    remove_ckpts();
}

/* -- Headers ------------------------------------------------------------------------------------
 */

static int parse(const char *json, uint64_t data_bytes, struct shd_err *e)
{
    struct safetensors *file = NULL;
    const int r = safetensors_parse(json, strlen(json), data_bytes, &file, e);
    safetensors_free(file);
    return r;
}

TEST(deep_and_odd_headers_get_an_answer)
{
    struct shd_err e = { 0 };
    static char deep[100001];
    memset(deep, '[', sizeof deep - 1);
    EXPECT_STATUS(parse(deep, 16, &e), SHD_EINVAL);
    EXPECT_STATUS(parse("{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                        "\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
                        16, &e),
                  SHD_EINVAL);
    EXPECT_HAS(e.text, "overlap");
    EXPECT_STATUS(
        parse("{\"w\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[0,0]}}", 0, &e), SHD_OK);
    EXPECT_STATUS(parse("{\"w\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}", 8, &e),
                  SHD_OK);
    EXPECT_STATUS(parse("{\"w\":{\"dtype\":\"F32\",\"shape\":[16777216,16777216,16777216],"
                        "\"data_offsets\":[0,8]}}",
                        8, &e),
                  SHD_EINVAL);
    EXPECT_STATUS(parse("{\"__metadata__\":{\"format\":\"pt\"}}", 0, &e), SHD_OK);
}

TEST(headers_survive_any_changed_byte)
{
    struct safetensors_tensor tensors[] = {
        { .name = "a", .dtype = SAFETENSORS_F32, .rank = 2, .shape = { 3, 5 } },
        { .name = "b.c", .dtype = SAFETENSORS_BF16, .rank = 0 },
    };
    struct safetensors_header header;
    struct shd_err e = { 0 };
    uint64_t rng = test_seed(7);
    EXPECT_OK(safetensors_header(tensors, 2, &header, &e), &e);
    EXPECT_EQ(header.bytes % SAFETENSORS_DATA_ALIGN, 0);
    EXPECT_EQ(header.file_bytes, header.bytes + 62);
    for (int i = 0; i < 20000; i++) {
        struct safetensors *file = NULL;
        const uint64_t at = 8 + test_random(&rng) % (header.bytes - 8);
        const char was = header.data[at];
        header.data[at] = (char)test_random(&rng);
        (void)safetensors_parse(header.data + 8, header.bytes - 8, 62, &file, &e);
        safetensors_free(file);
        header.data[at] = was;
    }
    free(header.data);
}

TEST(numbers_of_other_dtypes_become_the_nearest)
{
    static const uint16_t halves[] = { 0x0001, 0x8001, 0x03ff, 0x3c00, 0xc000, 0x7bff, 0xfc00 };
    static const float want[] = { 0x1p-24f, -0x1p-24f, 1023 * 0x1p-24f, 1, -2, 65504, -INFINITY };
    static const uint16_t brain[] = { 0x3f80, 0x0001, 0xff80 };
    static const double wide[] = { 1.0 + 0x1p-30, -1e300, 0.1 };
    float got[7];
    safetensors_to_f32(SAFETENSORS_F16, halves, 7, got);
    EXPECT(memcmp(got, want, sizeof want) == 0);
    safetensors_to_f32(SAFETENSORS_BF16, brain, 3, got);
    EXPECT(got[0] == 1 && got[1] == 0x1p-133f && got[2] == -INFINITY);
    safetensors_to_f32(SAFETENSORS_F64, wide, 3, got);
    EXPECT(got[0] == 1 && got[1] == -INFINITY && got[2] == 0.1f);
}

/* -- Weights ------------------------------------------------------------------------------------
 */

static int restore_weights(shd_session *s, const char *file, const char *spec, struct shd_err *e)
{
    char path[700];
    const struct shd_restore_options options = { .size = sizeof options,
                                                 .weights = true,
                                                 .spec_json = spec };
    snprintf(path, sizeof path, "%s/%s", ckpts, file);
    return shd_restore(s, path, &options, NULL, e);
}

TEST(weights_that_do_not_fit_are_refused_with_the_count)
{
    struct shd_err e = { 0 };
    shd_model *m;
    save_toy();
    shd_session *s = attach(PATIENT_MS);
    char file[64];
    snprintf(file, sizeof file, "%s/model.safetensors", step2);
    EXPECT_STATUS(restore_weights(s, file, toy_other_spec('8'), &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "tensor 'h0.w': has another shape in the file; 1 of 7 tensors");
    EXPECT_STATUS(restore_weights(s, "nothing", toy_spec("f32", TOY_ADAMW), &e), SHD_ENOENT);
    EXPECT_STATUS(restore_weights(s, file, NULL, &e), SHD_EINVAL);
    EXPECT_STATUS(restore_weights(s, file, "{", &e), SHD_EINVAL);
    EXPECT_STATUS(shd_model_attach(s, NULL, &m, &e), SHD_ENOENT);
    EXPECT_OK(restore_weights(s, step2, toy_spec("f32", TOY_SGD), &e), &e);
    EXPECT_OK(shd_model_attach(s, NULL, &m, &e), &e);
    EXPECT_EQ(shd_step(m), 0); /* another optimizer, moments of zero: weights alone */
    train_steps(m, 1);
    end(s);
}

/* -- What is in a file that is none --------------------------------------------------------------
 *
 * Daemons read with their own rights what a client names: their errors quote none of it. */

static void make_raw_restore(const struct round *round, const struct link *link,
                             struct wire_request *ret_request)
{
    const char *spec = toy_other_spec('8');
    ret_request->restore = (struct wire_restore){
        .path = round->ctx,
        .spec = { (const uint8_t *)spec, strlen(spec) },
        .owner = link->index,
        .owners = 2,
    };
}

static void expect_silent(shd_session *s, const char *file, int status)
{
    struct shd_err e = { 0 };
    EXPECT_STATUS(restore_weights(s, file, toy_spec("f32", TOY_ADAMW), &e), status);
    if (strstr(e.text, "hush") != NULL)
        FAIL("it says what is in %s: %s", file, e.text);
}

TEST(restore_errors_quote_nothing_of_a_file)
{
    struct shd_err e = { 0 };
    char path[400];
    save_toy();
    shd_session *s = attach(PATIENT_MS);
    EXPECT_EQ(shell("cd %s && printf 'hush:hush:hush' > text && "
                    "printf '\\016\\0\\0\\0\\0\\0\\0\\0{\"w\": hush:hu}' > header && "
                    "mkdir index linked && printf '{ hush' > index/model.safetensors.index.json && "
                    "ln -s ../text linked/model.safetensors && mkfifo fifo",
                    ckpts),
              0);
    expect_silent(s, "text", SHD_ERANGE);
    EXPECT_STATUS(restore_weights(s, "text", toy_spec("f32", TOY_ADAMW), &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "more than the 6 bytes behind its size");
    EXPECT(strstr(e.text, "7310") == NULL); /* "hush" as a number */
    expect_silent(s, "header", SHD_EINVAL);
    expect_silent(s, "index", SHD_EINVAL);
    expect_silent(s, "linked", SHD_ERANGE);
    expect_silent(s, "fifo", SHD_EINVAL);
    EXPECT_STATUS(restore_weights(s, "../../dev/null", toy_spec("f32", TOY_ADAMW), &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "not a regular file");
    EXPECT_EQ(shell("cd %s && mkdir own && echo 'hush hush' > own/shardd.json", ckpts), 0);
    snprintf(path, sizeof path, "%s/own", ckpts);
    EXPECT_STATUS(shd_restore(s, path, NULL, NULL, &e), SHD_EINVAL);
    EXPECT(strstr(e.text, "hush") == NULL);
    snprintf(path, sizeof path, "%s/%s", ckpts, step2); /* with a spec of one's own */
    struct round round = { .what = "raw",
                           .asks = WIRE_RESTORE,
                           .type = WIRE_RESTORED,
                           .make = make_raw_restore,
                           .ctx = path };
    EXPECT_STATUS(round_one(&round, &s->hub->links[0], 0, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "the spec in shardd.json is not the one asked for");
    end(s);
}

/* -- No room ------------------------------------------------------------------------------------
 */

static int save_status(shd_session *s, const char *dir, struct shd_err *e)
{
    shd_model *m;
    int r = shd_model_attach(s, "toy", &m, e);
    if (r == SHD_OK) {
        r = shd_checkpoint(m, dir, NULL, NULL, e);
        shd_model_close(m);
    }
    return r;
}

TEST(places_that_cannot_be_saved_in_are_named)
{
    struct shd_err e = { 0 };
    static char path[5000];
    save_toy();
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_restore(s, ckpts, NULL, NULL, &e), &e);
    EXPECT_STATUS(save_status(s, "/nowhere/at/all", &e), SHD_ENOENT);
    EXPECT_STATUS(save_status(s, "/proc/cannot", &e), SHD_ENOENT);
    EXPECT_STATUS(save_status(s, "", &e), SHD_EINVAL);
    snprintf(path, sizeof path, "%s/LATEST", ckpts);
    EXPECT_STATUS(save_status(s, path, &e), SHD_EIO);
    EXPECT_HAS(e.text, "Not a directory");
    memset(path, 'x', sizeof path - 1);
    path[0] = '/';
    EXPECT(save_status(s, path, &e) < 0);
    EXPECT_EQ(expect_all_good(), 1);
    end(s);
}

/* The limit is the saver's own; its daemons have none. */
TEST(a_limit_on_file_sizes_is_an_error)
{
    struct shd_err e = { 0 };
    struct rlimit limit, was;
    save_toy();
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_restore(s, ckpts, NULL, NULL, &e), &e);
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &was), 0);
    limit = was;
    limit.rlim_cur = 20000;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const int r = save_status(s, ckpts, &e);
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &was), 0);
    EXPECT_EQ(r, SHD_EIO);
    EXPECT_HAS(e.text, "RLIMIT_FSIZE allows 20000");
    EXPECT_EQ(expect_all_good(), 1);
    end(s);
}

TEST(a_daemon_that_cannot_write_says_so_and_lives)
{
    struct shd_err e = { 0 };
    struct rlimit was;
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    EXPECT_EQ(prlimit(daemons.pids[1], RLIMIT_FSIZE, NULL, &was), 0);
    const struct rlimit limit = { 20000, was.rlim_max };
    EXPECT_EQ(prlimit(daemons.pids[1], RLIMIT_FSIZE, &limit, NULL), 0);
    EXPECT_STATUS(shd_checkpoint(m, ckpts, NULL, NULL, &e), SHD_EIO);
    EXPECT_HAS(e.text, "File too large");
    train_steps(m, 1);
    EXPECT_EQ(shell("! ls -a %s | grep -q step", ckpts), 0);
    EXPECT_EQ(prlimit(daemons.pids[1], RLIMIT_FSIZE, &was, NULL), 0);
    save_ok(m, 0);
    end(s);
}

TEST(a_full_disk_leaves_the_previous_one)
{
    struct shd_err e = { 0 };
    make_ckpts();
    if (mount("tmpfs", ckpts, "tmpfs", 0, "size=512k") != 0) {
        remove_ckpts();
        SKIP("cannot mount a small file system here");
    }
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    save_ok(m, 0);
    train_steps(m, 1);
    EXPECT_STATUS(shd_checkpoint(m, ckpts, NULL, NULL, &e), SHD_EIO);
    EXPECT_HAS(e.text, "No space left on device: ");
    struct statvfs disk;
    const char *room = strstr(e.text, "device: ") + strlen("device: ");
    EXPECT(statvfs(ckpts, &disk) == 0); /* what it had made is gone again */
    EXPECT(strtoull(room, NULL, 10) < disk.f_bavail * disk.f_frsize);
    EXPECT_HAS(room, " are free");
    expect_latest("step-000000000001");
    EXPECT_EQ(expect_all_good(), 1);
    EXPECT_EQ(mount(NULL, ckpts, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    EXPECT_STATUS(shd_checkpoint(m, ckpts, NULL, NULL, &e), SHD_EIO);
    EXPECT_HAS(e.text, "Read-only");
    shd_close(s);
    fixture_stop(&daemons);
    EXPECT_EQ(umount(ckpts), 0);
    remove_ckpts();
}

/* -- A hostile coordinator ----------------------------------------------------------------------
 */

struct raw {
    shd_model *m;
    char path[700];
    uint64_t step;
};

static void make_raw(const struct round *round, const struct link *link,
                     struct wire_request *ret_request)
{
    const struct raw *raw = round->ctx;
    ret_request->checkpoint.model = raw->m->map->owners[link->index].layout.handle;
    ret_request->checkpoint.step = raw->step;
    ret_request->checkpoint.path = raw->path;
}

static int ask_raw(struct raw *raw, struct shd_err *e)
{
    struct hub *hub = raw->m->session->hub;
    struct round round = { .what = "raw",
                           .asks = WIRE_CHECKPOINT,
                           .type = WIRE_CHECKPOINTED,
                           .make = make_raw,
                           .ctx = raw };
    return round_one(&round, &hub->links[0], 0, e);
}

TEST(daemons_write_into_nothing_but_a_checkpoints_files)
{
    struct shd_err e = { 0 };
    struct raw raw = { .step = 1 };
    make_ckpts();
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    raw.m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(raw.m, 1);
    const struct shd_checkpointed saved = save_ok(raw.m, 0);
    snprintf(raw.path, sizeof raw.path, "%s/nowhere", ckpts);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_ENOENT);
    EXPECT_EQ(shell("ln -s %s/%s %s/link", ckpts, saved.name, ckpts), 0);
    snprintf(raw.path, sizeof raw.path, "%s/link", ckpts);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EIO);
    snprintf(raw.path, sizeof raw.path, "%s/%s", ckpts, saved.name);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "is a finished checkpoint and stays as it is");
    train_steps(raw.m, 1); /* of another step, whose bits would be others */
    raw.step = 2;
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EEXIST);
    EXPECT_EQ(expect_all_good(), 1);
    EXPECT_EQ(shell("cd %s && rm shardd.json", raw.path), 0); /* as a coordinator makes it */
    EXPECT_OK(ask_raw(&raw, &e), &e);
    raw.step = 1;
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "the open step is 2");
    raw.step = 2;
    EXPECT_EQ(shell("cd %s && truncate -s +1 leaves.bin", raw.path), 0);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EINVAL);
    EXPECT_EQ(shell("cd %s && truncate -s -1 leaves.bin && mv model.safetensors m && "
                    "ln -s m model.safetensors",
                    raw.path),
              0);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EIO);
    EXPECT_EQ(shell("cd %s && rm model.safetensors", raw.path), 0);
    EXPECT_EQ(shell("cd %s && mv m model.safetensors && ln model.safetensors m", raw.path), 0);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'model.safetensors' has 2 names");
    EXPECT_EQ(shell("cd %s && rm model.safetensors && mkfifo model.safetensors", raw.path), 0);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "not a regular file");
    EXPECT_EQ(shell("cd %s && cp --remove-destination optimizer-m.safetensors model.safetensors && "
                    "sed -i 's/97,53/53,97/' model.safetensors",
                    raw.path),
              0);
    EXPECT_STATUS(ask_raw(&raw, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "tensor 'wte' in 'model.safetensors' has another dtype or shape");
    train_steps(raw.m, 1);
    end(s);
}

TEST_MAIN()
