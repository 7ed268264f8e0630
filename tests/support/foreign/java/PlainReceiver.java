import org.zeromq.SocketType;
import org.zeromq.ZContext;
import org.zeromq.ZMQ;

/**
 * A plain receiver in Java: the frames of each message in hex, a line each.
 *
 * Arguments: PULL or SUB, endpoint, how many messages, and for SUB the topic.
 */
public class PlainReceiver {
    public static void main(String[] arguments) {
        int count = Integer.parseInt(arguments[2]);
        ZContext context = new ZContext();
        ZMQ.Socket socket = context.createSocket(SocketType.valueOf(arguments[0]));
        // One connection in a hundred of JeroMQ 0.6.0 never shakes hands; after this it is made anew, not after 30 s.
        socket.setHandshakeIvl(3000);
        if (arguments[0].equals("SUB")) {
            socket.subscribe(arguments[3].getBytes());
        }
        socket.connect(arguments[1]);
        for (int i = 0; i < count; i++) {
            StringBuilder line = new StringBuilder(hex(socket.recv()));
            while (socket.hasReceiveMore()) {
                line.append(',').append(hex(socket.recv()));
            }
            System.out.println(line);
        }
        System.out.flush();
        context.close();
    }

    private static String hex(byte[] frame) {
        StringBuilder digits = new StringBuilder();
        for (int i = 0; i < frame.length; i++) {
            digits.append(Character.forDigit((frame[i] >> 4) & 15, 16)).append(Character.forDigit(frame[i] & 15, 16));
        }
        return digits.toString();
    }
}
