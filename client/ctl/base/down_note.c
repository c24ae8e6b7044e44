/* See down_note.h. */
#include "client/ctl/base/down_note.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/text.h"
#include "proto/base/clock.h"

#define STALE_NS (UINT64_C(300) * NS_PER_S) /* overdue for so long: nobody tries any more */

static bool path_of(char *buf, size_t bytes, const char *dir)
{
    return snprintf(buf, bytes, "%s/" DOWN_NOTE_FILE, dir) < (int)bytes;
}

int down_note_open(const char *dir)
{
    char path[512];
    if (!path_of(path, sizeof path, dir))
        return -1;
    return open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
}

size_t down_note_add(char *text, size_t bytes, size_t used, const char *device,
                     const struct down_note *note)
{
    char why[DOWN_NOTE_WHY_BYTES];
    text_clean(note->why, why, sizeof why); /* one line */
    const int n = snprintf(text + used, bytes - used,
                           "%s since=%" PRIu64 " next=%" PRIu64 " tries=%" PRIu32 " kept=%" PRIu32
                           " why=%s\n",
                           device, note->since_ns, note->next_ns, note->tries, note->kept, why);
    return n > 0 && (size_t)n < bytes - used ? used + (size_t)n : used;
}

void down_note_write(int fd, const char *text, size_t bytes)
{
    if (fd >= 0 && pwrite(fd, text, bytes, 0) == (ssize_t)bytes && ftruncate(fd, (off_t)bytes) < 0)
        return; /* older lines behind ours: what they say was true a moment ago */
}

/* A whole line "DEVICE since=..."; false when it is another device's, or no line. */
static bool parse(const char *line, const char *device, struct down_note *ret_note)
{
    const size_t bytes = strlen(device);
    struct down_note n = { 0 };
    if (strncmp(line, device, bytes) != 0 || line[bytes] != ' ')
        return false;
    if (sscanf(line + bytes, " since=%" SCNu64 " next=%" SCNu64 " tries=%" SCNu32 " kept=%" SCNu32,
               &n.since_ns, &n.next_ns, &n.tries, &n.kept) != 4)
        return false;
    const char *why = strstr(line, " why=");
    if (why == NULL)
        return false;
    text_clean(why + strlen(" why="), n.why, sizeof n.why);
    *ret_note = n;
    return true;
}

bool down_note_read(const char *dir, const char *device, struct down_note *ret_note)
{
    char path[512];
    if (!path_of(path, sizeof path, dir))
        return false;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    char *text = fd >= 0 ? malloc(DOWN_NOTE_FILE_BYTES_MAX + 1) : NULL;
    const ssize_t got = text != NULL ? read(fd, text, DOWN_NOTE_FILE_BYTES_MAX) : -1;
    if (fd >= 0)
        close(fd);
    bool found = false;
    if (got > 0) {
        text[got] = '\0';
        char *rest = text;
        for (char *line = strsep(&rest, "\n"); rest != NULL && !found; line = strsep(&rest, "\n"))
            found = parse(line, device, ret_note);
    }
    free(text);
    const uint64_t now_ns = clock_now_ns();
    return found && ret_note->since_ns <= now_ns &&
           (ret_note->next_ns == 0 || ret_note->next_ns + STALE_NS > now_ns);
}

const char *down_note_text(const struct down_note *note, uint64_t now_ns, char *buf)
{
    char since[TEXT_BYTES], next[TEXT_BYTES], when[TEXT_BYTES + 16] = "one is under way";
    text_time((double)(now_ns - note->since_ns) / NS_PER_S, since);
    if (note->next_ns > now_ns)
        snprintf(when, sizeof when, "the next in %s",
                 text_time((double)(note->next_ns - now_ns) / NS_PER_S, next));
    int n = snprintf(buf, DOWN_NOTE_BYTES, "%s; not started for %s (%" PRIu32 " tr%s), %s",
                     note->why, since, note->tries, note->tries == 1 ? "y" : "ies", when);
    if (note->kept > 0 && n > 0 && n < (int)DOWN_NOTE_BYTES)
        snprintf(buf + n, DOWN_NOTE_BYTES - (size_t)n,
                 "; its state is kept (%" PRIu32 " segment%s)", note->kept,
                 note->kept == 1 ? "" : "s");
    return buf;
}
