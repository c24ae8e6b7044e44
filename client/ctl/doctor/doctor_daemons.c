/* Each socket of the runtime directory: does a daemon answer, is it our version, who keeps its
 * state. */
#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "client/ctl/ctl.h"
#include "client/ctl/doctor/doctor.h"
#include "client/shd.h"
#include "proto/share/fdpass.h"

#define ANSWER_MS_MAX 5000

/* What the status says beyond "it answers". */
static void check_status(struct doctor *d, const char *device, const json_t *status)
{
    const char *version = json_string_value(json_object_get(status, "version"));
    const char *keeper = json_string_value(json_object_get(status, "keeper"));
    const int pid = (int)json_integer_value(json_object_get(status, "pid"));
    const size_t models = json_array_size(json_object_get(status, "models"));
    if (version == NULL || strcmp(version, SHD_VERSION) != 0)
        doctor_warn(d, "restart the daemon (its keeper hands the state over), or use its shardctl",
                    "%s: shardd %s, this shardctl is %s", device, version != NULL ? version : "?",
                    SHD_VERSION);
    if (keeper != NULL && strcmp(keeper, "none") == 0)
        doctor_warn(d, "start it by systemd (shardd@), `shardctl run` or `shardctl up`",
                    "%s: pid %d answers, %zu model%s; nothing keeps its state when it dies", device,
                    pid, models, models == 1 ? "" : "s");
    else
        doctor_ok(d, "%s: pid %d answers, %zu model%s%s%s", device, pid, models,
                  models == 1 ? "" : "s", keeper != NULL ? ", keeper: " : "",
                  keeper != NULL ? keeper : "");
}

static void check_answers(struct doctor *d, const char *device)
{
    char address[PATH_MAX + 64];
    snprintf(address, sizeof(address), "%s?%s", d->runtime_dir, device);
    const struct shd_options options = { .size = sizeof(options),
                                         .address = address,
                                         .name = "shardctl doctor",
                                         .timeout_ms = ANSWER_MS_MAX };
    struct shd_err e = { 0 };
    shd_session *s;
    char *text = NULL;
    json_t *status = NULL;
    if (shd_connect(&options, &s, &e) != SHD_OK) {
        doctor_fail(d, "restart the daemon if it hangs; else what the text says", "%s: %s", device,
                    e.text);
        return;
    }
    if (shd_status(s, 0, &text, &e) == SHD_OK)
        status = json_loads(text, 0, NULL);
    if (status != NULL)
        check_status(d, device, status);
    else
        doctor_fail(d, "restart the daemon", "%s: no status: %s", device, e.text);
    json_decref(status);
    free(text);
    shd_close(s);
}

static void check_socket(struct doctor *d, const char *device)
{
    char path[PATH_MAX];
    struct shd_err e = { 0 };
    int fd;
    snprintf(path, sizeof(path), "%s/%s.sock", d->runtime_dir, device);
    const int r = side_connect(path, &fd, &e);
    if (r == SHD_OK) {
        close(fd);
        check_answers(d, device);
    } else if (r == SHD_EGONE) {
        doctor_warn(d, "start it again: the next daemon replaces the socket",
                    "%s: stale socket, its daemon was killed", device);
    } else if (r == SHD_EAUTH) {
        doctor_fail(d, "become a member of the directory's group, or run as its owner", "%s: %s",
                    device, e.text);
    } else {
        doctor_fail(d, "restart the daemon", "%s: %s", device, e.text);
    }
}

void doctor_daemons(struct doctor *d)
{
    DIR *dir = opendir(d->runtime_dir);
    unsigned count = 0;
    const struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        char device[NAME_MAX + 1];
        const char *dot = strrchr(entry->d_name, '.');
        if (dot == NULL || dot == entry->d_name || strcmp(dot, ".sock") != 0)
            continue;
        snprintf(device, sizeof(device), "%.*s", (int)(dot - entry->d_name), entry->d_name);
        check_socket(d, device);
        count++;
    }
    if (dir != NULL)
        closedir(dir);
    if (count == 0)
        doctor_ok(d, "none in %s", d->runtime_dir);
}
