/* Device memory that outlives its maker: exported, kept by this process (which has no driver),
 * imported by others. Each life is a process of its own, killed in the middle of a kernel by the
 * emulation; its successor adopts, repairs and goes on. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "kernels/cuda/cuda.h"
#include "proto/share/fdpass.h"
#include "tests/cuda/cuda_util.h"
#include "tests/lib/child.h"

#define ELEMS       (70 * BLOCK) /* chunks with a short last one */
#define CHUNKS      3u
#define ARRAYS      5u /* acc, param, m, v, grad */
#define ARRAY_BYTES (ELEMS * sizeof(float))
#define SCRIPT_OPS  9u

/* What the keeper and all lives see. */
struct marks {
    _Atomic uint64_t done; /* the script's last finished operation */
    struct kern_sum sum;   /* of the last one */
    float arrays[ARRAYS - 1][ELEMS];
    uint16_t publish[ELEMS];
};

#define MUST_RUN(op, ...)                                           \
    do {                                                            \
        struct kern_waiter run_waiter;                              \
        kern_waiter_init(&run_waiter);                              \
        MUST_OK(kern_##op(k, (__VA_ARGS__), &run_waiter.done, &e)); \
        MUST(kern_wait(&run_waiter) == SHD_OK);                     \
    } while (0)

/* Segment and publish of a life, and where things are in it. */
struct world {
    struct segment state;
    float *acc, *param, *m, *v, *grad;
    struct kern_trail_area *area;
    void *publish;
};

static struct world world_of(struct kern *k, const struct segment *s)
{
    struct world w = { .state = *s };
    w.acc = s->base;
    w.param = w.acc + ELEMS;
    w.m = w.param + ELEMS;
    w.v = w.m + ELEMS;
    w.grad = w.v + ELEMS;
    w.area = (void *)(w.grad + ELEMS);
    w.publish = k->ops->alloc(k, ELEMS * 2);
    MUST(w.publish != NULL);
    return w;
}

static uint64_t state_bytes(const struct kern *k)
{
    return ARRAYS * ARRAY_BYTES + k->ops->trail_bytes(k, 2 * CHUNKS);
}

static void world_fill(struct kern *k, const struct world *w)
{
    for (uint64_t i = 0; i < ARRAYS; i++) {
        const bool v = w->acc + i * ELEMS == w->v; /* not negative */
        MUST_RUN(fill, &(struct kern_fill){ w->acc + i * ELEMS, ELEMS, 0, 100 + i,
                                            v ? KERN_FILL_UNIFORM : KERN_FILL_NORMAL, 0, 1 });
    }
}

static struct kern_trail trail_of(const struct world *w, struct marks *marks, uint64_t op)
{
    return (struct kern_trail){
        .area = w->area,
        .base = w->state.base,
        .first_chunk = op % 3 == 0 ? 0 : CHUNKS,
        .op = op,
        .done = &marks->done,
        .done_value = op,
    };
}

/* Accumulate, and the optimizers in turn. */
static void script_run(struct kern *k, const struct world *w, struct marks *marks, uint64_t op,
                       bool trail)
{
    static const struct kern_run runs[] = { { 3, 70001, 0 }, { 70100, ELEMS - 70100 - 9, 1 } };
    static const struct kern_hyper hypers[] = {
        { 1e-3f,
          0.1f,
          0.9f,
          0.999f,
          1e-8f,
          0.1f,
          0.001f,
          { .scale = 0 },
          { .lr = 0 },
          { .rho = 0 } },
        { 3e-2f, 0, 0.8f, 0.95f, 1e-6f, 0.7f, 0.4f, { .scale = 0 }, { .lr = 0 }, { .rho = 0 } }
    };
    if (op % 3 == 0) {
        struct kern_sum sum = { .finite = true };
        fixsum_init(&sum.sum);
        struct kern_accumulate a = {
            .acc = w->acc, .grad = w->grad, .grad_dtype = SHD_F32, .elems = ELEMS, .sum = &sum
        };
        if (trail)
            a.trail = trail_of(w, marks, op);
        MUST_RUN(accumulate, &a);
        marks->sum = sum;
        return;
    }
    struct kern_update a = { .kind = op % 3 == 1 ? SPEC_ADAMW
                                     : op == 2   ? SPEC_SGD
                                                 : SPEC_LION,
                             .param = w->param,
                             .m = w->m,
                             .v = w->v,
                             .grad = w->acc,
                             .grad_scale = 0.37f,
                             .publish = w->publish,
                             .publish_dtype = SHD_BF16,
                             .elems = ELEMS,
                             .runs = runs,
                             .run_count = 2,
                             .hypers = hypers,
                             .hyper_count = 2 };
    if (trail)
        a.trail = trail_of(w, marks, op);
    MUST_RUN(update, &a);
}

static void script_finish(struct kern *k, const struct world *w, struct marks *marks, bool trail)
{
    for (uint64_t op = trail ? marks->done + 1 : 1; op <= SCRIPT_OPS; op++)
        script_run(k, w, marks, op, trail);
    MUST_RUN(copy, &(struct kern_copy){ marks->arrays, w->acc, sizeof marks->arrays });
    MUST_RUN(cast, &(struct kern_cast){ marks->publish, SHD_BF16, w->param, ELEMS });
}

static void send_segment(int side, const struct segment *s)
{
    const struct side_msg msg = { .type = SIDE_SEGMENT, .bytes = s->bytes, .kind = SEGMENT_STATE };
    MUST_OK(side_send(side, &msg, s->fd, &e));
}

static struct segment receive_segment(struct kern *k, int side, enum segment_kind kind)
{
    struct side_msg msg;
    struct segment s;
    int fd;
    MUST_OK(side_recv(side, -1, &msg, &fd, &e));
    MUST_OK(k->ops->segment_map(k, fd, kind, msg.bytes, NULL, &s, &e));
    return s;
}

/* A worker's: may read all of it, and write nothing. */
static void look(struct kern *k, int side)
{
    struct segment s = receive_segment(k, side, SEGMENT_PUBLISH);
    uint64_t *got = malloc(s.bytes);
    MUST(got != NULL);
    MUST_RUN(copy, &(struct kern_copy){ got, s.base, s.bytes });
    for (uint64_t i = 0; i < s.bytes / 8; i++)
        MUST(got[i] == i * 7);
    struct kern_waiter w;
    kern_waiter_init(&w);
    MUST_OK(kern_copy(k, &(struct kern_copy){ s.base, got, 8 }, &w.done, &e));
    MUST(kern_wait(&w) == SHD_EIO);
    free(got);
    k->ops->segment_close(k, &s);
}

/* Make a segment, hand it over, and wait to be killed. */
static void hold(struct kern *k, int side)
{
    struct segment s;
    MUST_OK(k->ops->segment_new(k, "hold", SEGMENT_STATE, 5 << 20, &s, &e));
    uint64_t *pattern = malloc(s.bytes);
    MUST(pattern != NULL);
    for (uint64_t i = 0; i < s.bytes / 8; i++)
        pattern[i] = i * 7;
    MUST_RUN(copy, &(struct kern_copy){ s.base, pattern, s.bytes });
    send_segment(side, &s);
    for (;;)
        pause();
}

/* argv: --life mode side marks
 *
 *     hold     make a segment, and wait to be killed
 *     look     read one
 *     plain    the whole script, without a trail
 *     make     the script's beginning
 *     adopt    repair what is there, and go on to the script's end
 *     repair   only that
 */
static int life_main(char **argv)
{
    const char *mode = argv[2];
    const int side = atoi(argv[3]);
    struct marks *marks = mmap(NULL, sizeof *marks, PROT_READ | PROT_WRITE, MAP_SHARED,
                               atoi(argv[4]), 0);
    MUST(marks != MAP_FAILED);
    struct kern *k;
    MUST_OK(kern_cuda_new(0, &k, &e));
    if (strcmp(mode, "hold") == 0)
        hold(k, side);
    if (strcmp(mode, "look") == 0) {
        look(k, side);
        k->ops->free(k);
        return 0;
    }
    const bool trail = strcmp(mode, "plain") != 0;
    struct world w;
    struct segment s;
    if (strcmp(mode, "adopt") == 0 || strcmp(mode, "repair") == 0) {
        s = receive_segment(k, side, SEGMENT_STATE);
        w = world_of(k, &s);
        MUST_OK(k->ops->trail_repair(k, w.area, s.base, s.bytes, NULL, 2 * CHUNKS, &e));
    } else {
        MUST_OK(k->ops->segment_new(k, "life", SEGMENT_STATE, state_bytes(k), &s, &e));
        w = world_of(k, &s);
        world_fill(k, &w);
        send_segment(side, &s);
    }
    if (strcmp(mode, "make") != 0 && strcmp(mode, "repair") != 0)
        script_finish(k, &w, marks, trail);
    k->ops->release(k, w.publish, ELEMS * 2);
    k->ops->segment_close(k, &s);
    k->ops->free(k);
    return 0;
}

/* -- The keeper ------------------------------------------------------------------------------- */

struct keeper {
    struct marks *marks;
    int marks_fd;
    int segment; /* kept */
    uint64_t bytes;
};

static struct keeper keeper_new(void)
{
    struct keeper kp = { .segment = -1, .marks_fd = memfd_create("marks", 0) };
    EXPECT(kp.marks_fd >= 0 && ftruncate(kp.marks_fd, sizeof(struct marks)) == 0);
    void *marks = mmap(NULL, sizeof(struct marks), PROT_READ | PROT_WRITE, MAP_SHARED, kp.marks_fd,
                       0);
    EXPECT(marks != MAP_FAILED);
    kp.marks = marks;
    return kp;
}

static void keeper_free(struct keeper *kp)
{
    munmap(kp->marks, sizeof *kp->marks);
    close(kp->marks_fd);
    if (kp->segment >= 0)
        close(kp->segment);
}

static const char *shim_fail; /* SHIM_CUDA_FAIL of lives that are started now; NULL: none */

/* Start a life; stop_at: event at which it dies, 0: none. */
static pid_t start(const struct keeper *kp, const char *mode, uint64_t stop_at, int *ret_side)
{
    int pair[2];
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        char side[16], marks[16], at[32];
        close(pair[0]);
        snprintf(side, sizeof side, "%d", pair[1]);
        snprintf(marks, sizeof marks, "%d", kp->marks_fd);
        snprintf(at, sizeof at, "%" PRIu64, stop_at);
        if (stop_at > 0) {
            setenv("EMULATE_STOP_AT", at, 1);
            setenv("EMULATE_SEED", at, 1);
            setenv("EMULATE_RESIDENT", "4", 1);
        }
        if (shim_fail != NULL)
            setenv("SHIM_CUDA_FAIL", shim_fail, 1);
        execl("/proc/self/exe", "test", "--life", mode, side, marks, NULL);
        _exit(127);
    }
    close(pair[1]);
    *ret_side = pair[0];
    return pid;
}

static void keep(struct keeper *kp, int side)
{
    struct side_msg msg;
    struct shd_err e = { 0 };
    EXPECT_OK(side_recv(side, 60000, &msg, &kp->segment, &e), &e);
    kp->bytes = msg.bytes;
}

static void hand_out(const struct keeper *kp, int side)
{
    const struct side_msg msg = { .type = SIDE_SEGMENT, .bytes = kp->bytes, .kind = SEGMENT_STATE };
    struct shd_err e = { 0 };
    EXPECT_OK(side_send(side, &msg, kp->segment, &e), &e);
}

static int wait_for(pid_t pid, int side)
{
    int status;
    EXPECT(waitpid(pid, &status, 0) == pid);
    close(side);
    return status;
}

TEST(memory_outlives_its_maker)
{
    struct keeper kp = keeper_new();
    int side;
    const pid_t maker = start(&kp, "hold", 0, &side);
    keep(&kp, side);
    EXPECT(kill(maker, SIGKILL) == 0);
    const int killed = wait_for(maker, side);
    EXPECT(WIFSIGNALED(killed) && WTERMSIG(killed) == SIGKILL);
    for (int i = 0; i < 2; i++) { /* as often as one likes */
        const pid_t reader = start(&kp, "look", 0, &side);
        hand_out(&kp, side);
        EXPECT_EQ(wait_for(reader, side), 0);
    }
    keeper_free(&kp);
}

TEST(killed_lives_are_finished_by_their_successors)
{
    struct keeper plain = keeper_new(), kp = keeper_new();
    int side;
    pid_t life = start(&plain, "plain", 0, &side);
    keep(&plain, side);
    EXPECT_EQ(wait_for(life, side), 0);

    life = start(&kp, "make", 0, &side);
    keep(&kp, side);
    EXPECT_EQ(wait_for(life, side), 0);
    uint64_t state = test_seed(20261121);
    uint32_t deaths = 0;
    const bool emulated =
        shim_is_there(); /* a GPU cannot be told to stop: it goes through at once */
    for (bool finished = false; !finished;) {
        const uint64_t stop_at = emulated && deaths < 30 ? 1 + test_random(&state) % 20000 : 0;
        life = start(&kp, "adopt", stop_at, &side);
        hand_out(&kp, side);
        const int status = wait_for(life, side);
        finished = status == 0;
        if (!finished && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
            FAIL("a life ended with status %#x", (unsigned)status);
        deaths += !finished;
    }
    printf("%" PRIu32 " deaths\n", deaths);
    EXPECT(emulated ? deaths > 5 : deaths == 0);
    EXPECT_EQ(kp.marks->done, SCRIPT_OPS);
    EXPECT(memcmp(kp.marks->arrays, plain.marks->arrays, sizeof plain.marks->arrays) == 0);
    EXPECT(memcmp(kp.marks->publish, plain.marks->publish, sizeof plain.marks->publish) == 0);
    EXPECT(memcmp(&kp.marks->sum.sum.limb, &plain.marks->sum.sum.limb,
                  sizeof plain.marks->sum.sum.limb) == 0);
    keeper_free(&kp);
    keeper_free(&plain);
}

/* -- Repairs that are killed --------------------------------------------------------------------
 */

/* What is kept, as a death has left it. */
struct image {
    uint8_t *bytes; /* owned, [kp->bytes] */
    uint64_t done;
};

static void image_take(const struct keeper *kp, struct image *image)
{
    EXPECT(pread(kp->segment, image->bytes, kp->bytes, 0) == (ssize_t)kp->bytes);
    image->done = kp->marks->done;
}

static void image_put(const struct keeper *kp, const struct image *image)
{
    EXPECT(pwrite(kp->segment, image->bytes, kp->bytes, 0) == (ssize_t)kp->bytes);
    kp->marks->done = image->done;
}

/* A life on what is kept; true: it was killed. */
static bool run_life(const struct keeper *kp, const char *mode, uint64_t stop_at, const char *fail)
{
    int side;
    shim_fail = fail;
    const pid_t life = start(kp, mode, stop_at, &side);
    shim_fail = NULL;
    hand_out(kp, side);
    const int status = wait_for(life, side);
    if (status != 0 && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
        FAIL("%s: a life ended with status %#x", fail != NULL ? fail : mode, (unsigned)status);
    return status != 0;
}

static void expect_plain(const struct keeper *kp, const struct keeper *plain, const char *fail)
{
    if (kp->marks->done != SCRIPT_OPS ||
        memcmp(kp->marks->arrays, plain->marks->arrays, sizeof plain->marks->arrays) != 0 ||
        memcmp(kp->marks->publish, plain->marks->publish, sizeof plain->marks->publish) != 0)
        FAIL("a repair killed at %s left other bits", fail);
}

/* Killed in the n-th of its copies (the first one reads the trail, the others put values back) or
 * its memsets (each frees a record), for every n there is; every other one's successor, too, in its
 * last but one. Returns how many there were. */
static uint32_t kill_repairs(const struct keeper *kp, const struct keeper *plain,
                             const struct image *image, const char *work)
{
    for (uint32_t n = 1;; n++) {
        char fail[32], again[32];
        snprintf(fail, sizeof fail, "%s@%" PRIu32 ":kill", work, n);
        snprintf(again, sizeof again, "%s@%" PRIu32 ":kill", work, n > 1 ? n - 1 : 1);
        image_put(kp, image);
        if (!run_life(kp, "repair", 0, fail))
            return n - 1;
        if (n % 2 == 0)
            run_life(kp, "repair", 0, again);
        EXPECT(!run_life(kp, "adopt", 0, NULL));
        expect_plain(kp, plain, fail);
    }
}

/* Deaths in the middle of operations of each kind, found by looking for records that speak: repairs
 * that copy something back. */
TEST(repairs_killed_at_any_point_are_finished_by_others)
{
    struct keeper plain = keeper_new(), kp = keeper_new();
    struct image begun, image;
    int side;
    NEEDS_SHIM(); /* nor in the middle of a repair */
    pid_t life = start(&plain, "plain", 0, &side);
    keep(&plain, side);
    EXPECT_EQ(wait_for(life, side), 0);
    life = start(&kp, "make", 0, &side);
    keep(&kp, side);
    EXPECT_EQ(wait_for(life, side), 0);
    begun.bytes = malloc(kp.bytes);
    image.bytes = malloc(kp.bytes);
    EXPECT(begun.bytes != NULL && image.bytes != NULL);
    image_take(&kp, &begun);
    uint64_t state = test_seed(20261122);
    uint32_t copies = 0, memsets = 0, speaking = 0;
    for (uint32_t deaths = 0; deaths < 3; deaths++) {
        image_put(&kp, &begun);
        EXPECT(run_life(&kp, "adopt", 2000 + test_random(&state) % 60000, NULL));
        image_take(&kp, &image);
        const uint32_t copied = kill_repairs(&kp, &plain, &image, "copy");
        copies += copied;
        memsets += kill_repairs(&kp, &plain, &image, "memset");
        speaking += copied > 1;
    }
    printf("%" PRIu32 " copies and %" PRIu32 " memsets of repairs, killed in each\n", copies,
           memsets);
    EXPECT(speaking >= 2 && copies >= 8 && memsets >= 4);
    free(begun.bytes);
    free(image.bytes);
    keeper_free(&kp);
    keeper_free(&plain);
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "--life") == 0)
        return life_main(argv);
    return test_run_all(argc, argv);
}
