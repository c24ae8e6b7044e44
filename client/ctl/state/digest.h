/* shardctl digest: SHA-256 over a model. */
#ifndef SHD_CTL_DIGEST_H
#define SHD_CTL_DIGEST_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_digest(int argc, char **argv);

#endif
